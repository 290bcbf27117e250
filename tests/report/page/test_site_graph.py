"""The drawing of an episode on a website shows what its file tells, keeps pages apart, and believes nothing of it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidle.report.page.graph_layout import halo, placed, spread
from unidle.report.page.site_graph import SIZE, site_graph_section
from unidle.report.page.svg import standalone

SVG = "{http://www.w3.org/2000/svg}"


def page(parent: int, state: str = "fetched", relevant: bool = False, **other: Any) -> dict[str, Any]:
    return {
        "url": "http://127.0.0.1/x",
        "state": state,
        "relevance": 0.5,
        "relevant": relevant,
        "parent": parent,
        "others": 3,
        **other,
    }


def told(pages: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    return {"step": 2048, "pages": pages, "links": [], "known": 60, "visited": len(pages), **other}


def drawn(folder: Path, story: Any) -> str:
    (folder / "page_graph.json").write_text(story if isinstance(story, str) else json.dumps(story))
    return site_graph_section(folder)


def svg_of(section: str) -> ET.Element:
    start = section.index("<svg")
    return ET.fromstring(section[start : section.index("</svg>") + 6])


def count(svg: ET.Element, kind: str) -> int:
    return len([part for part in svg.iter() if kind in (part.get("class") or "").split()])


def test_every_page_is_drawn_as_what_it_was_and_in_its_order(tmp_path: Path) -> None:
    pages = [page(-1), page(0, relevant=True), page(0, "failed"), page(1, "duplicate"), page(1, relevant=True)]
    svg = svg_of(drawn(tmp_path, told(pages, links=[[0, 1], [0, 2], [1, 2], [2, 1]])))
    visits = [part.text for part in svg.iter(f"{SVG}text") if part.get("class") == "visit"]
    assert visits == ["start", "1", "2", "3", "4"]
    spots = [part.get("class") for part in svg.iter(f"{SVG}g") if (part.get("class") or "").startswith("spot")]
    order = ["spot other", "spot found", "spot failed", "spot twice", "spot found"]
    assert spots == order * 2  # in the graph, and in the strip below
    assert count(svg, "walk") == 1 + 4  # the legend's, and from page to page
    assert count(svg, "tree") == 1 + 4
    assert count(svg, "link") == 1  # between pages 1 and 2; the others are the tree's
    assert len([part for group in svg.iter(f"{SVG}g") if group.get("class") == "heard fill" for part in group]) == 15
    assert "2 of 5 visited pages are about the topic; 60 pages are known" in ET.tostring(svg, "unicode")


def test_it_is_a_picture_of_its_own_too(tmp_path: Path) -> None:
    section = drawn(tmp_path, told([page(-1), page(0)]))
    svg = section[section.index("<svg") : section.index("</svg>") + 6]
    assert ET.fromstring(standalone(svg, SIZE)).tag == f"{SVG}svg"


def test_without_a_file_there_is_no_section(tmp_path: Path) -> None:
    assert site_graph_section(tmp_path) == ""


def test_what_a_website_says_is_text_and_nothing_else(tmp_path: Path) -> None:
    url = "http://x/</title></svg><script>alert(1)</script>" + "y" * 10_000
    section = drawn(tmp_path, told([page(-1, url=url), page(0, url=url)]))
    assert "<script" not in section
    assert "&lt;script" in section
    assert len(section) < 20_000


@pytest.mark.parametrize(
    "story",
    [
        "",
        "[1, 2",
        "[]",
        "3",
        {"pages": []},
        told([]),
        told([page(-1), page(1)]),  # named by itself
        told([page(-1), page(5)]),
        told([page(-1, state="elsewhere")]),
        told([page(-1, relevance="much")]),
        told([page(-1, others=None)]),
        told([page(-1)], links=[[1, 2, 3]]),
        told([page(-1)], step=None),
    ],
    ids=str,
)
def test_a_file_that_is_not_such_a_story_is_passed_over(tmp_path: Path, story: Any) -> None:
    assert drawn(tmp_path, story) == ""


def test_links_to_nowhere_and_too_many_pages_are_left_out(tmp_path: Path) -> None:
    pages = [page(-1), *(page(0, others=10**6) for _ in range(500))]
    section = drawn(tmp_path, told(pages, links=[[0, 700], [-3, 1], [2, 3]]))
    svg = svg_of(section)
    assert count(svg, "link") == 1
    assert count(svg, "start") == 1
    assert "the first 120 are shown" in section
    assert len(section) < 3_000_000


@pytest.mark.parametrize("shape", ["star", "chain", "bush", "one"])
def test_pages_lie_apart_and_within_the_picture(shape: str) -> None:
    rng = np.random.default_rng(0)
    count = 1 if shape == "one" else 41
    named_by = {"star": lambda n: 0, "chain": lambda n: n - 1}.get(shape, lambda n: int(rng.integers(n)))
    parents = np.array([-1, *(named_by(n) for n in range(1, count))])
    halos = np.array([halo(int(dots)) for dots in rng.integers(0, 30, count)])
    box = (10.0, 80.0, 1090.0, 560.0)
    places, scale = placed(spread(parents, halos, []), halos, box)
    assert (places - scale * halos[:, None] >= np.array(box[:2]) - 0.1).all()
    assert (places + scale * halos[:, None] <= np.array(box[2:]) + 0.1).all()
    assert scale > 0.35
    for a in range(count):
        for b in range(a):
            assert math.dist(places[a], places[b]) > 20 * scale  # the numbers can be read
