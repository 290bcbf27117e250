"""The graph of an episode on a website: content, layout, and robustness against invalid files."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidle.report.page.graph_layout import fit_to_box, halo, layout_pages
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


def episode(pages: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    return {"step": 2048, "pages": pages, "links": [], "known": 60, "visited": len(pages), **other}


def drawn(folder: Path, content: Any) -> str:
    (folder / "page_graph.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return site_graph_section(folder)


def svg_of(section: str) -> ET.Element:
    start = section.index("<svg")
    return ET.fromstring(section[start : section.index("</svg>") + 6])


def count(svg: ET.Element, kind: str) -> int:
    return len([part for part in svg.iter() if kind in (part.get("class") or "").split()])


def test_every_page_is_drawn_with_its_state_and_visit_order(tmp_path: Path) -> None:
    pages = [page(-1), page(0, relevant=True), page(0, "failed"), page(1, "duplicate"), page(1, relevant=True)]
    svg = svg_of(drawn(tmp_path, episode(pages, links=[[0, 1], [0, 2], [1, 2], [2, 1]])))
    visits = [part.text for part in svg.iter(f"{SVG}text") if part.get("class") == "visit"]
    assert visits == ["start", "1", "2", "3", "4"]
    nodes = [part.get("class") for part in svg.iter(f"{SVG}g") if (part.get("class") or "").startswith("spot")]
    order = ["spot other", "spot found", "spot failed", "spot duplicate", "spot found"]
    assert nodes == order * 2  # in the graph, and in the strip below
    assert count(svg, "walk") == 1 + 4  # legend, and page to page
    assert count(svg, "tree") == 1 + 4
    assert count(svg, "link") == 1  # between pages 1 and 2; the others are tree edges
    assert (
        len([part for group in svg.iter(f"{SVG}g") if group.get("class") == "unvisited fill" for part in group]) == 15
    )
    assert "2 of 5 visited pages are about the topic; 60 pages are known" in ET.tostring(svg, "unicode")


def test_svg_is_valid_as_standalone_image(tmp_path: Path) -> None:
    section = drawn(tmp_path, episode([page(-1), page(0)]))
    svg = section[section.index("<svg") : section.index("</svg>") + 6]
    assert ET.fromstring(standalone(svg, SIZE)).tag == f"{SVG}svg"


def test_section_is_empty_without_file(tmp_path: Path) -> None:
    assert site_graph_section(tmp_path) == ""


def test_text_from_websites_is_escaped_and_truncated(tmp_path: Path) -> None:
    url = "http://x/</title></svg><script>alert(1)</script>" + "y" * 10_000
    section = drawn(tmp_path, episode([page(-1, url=url), page(0, url=url)]))
    assert "<script" not in section
    assert "&lt;script" in section
    assert len(section) < 20_000


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2",
        "[]",
        "3",
        {"pages": []},
        episode([]),
        episode([page(-1), page(1)]),  # its own parent
        episode([page(-1), page(5)]),
        episode([page(-1, state="elsewhere")]),
        episode([page(-1, relevance="much")]),
        episode([page(-1, others=None)]),
        episode([page(-1)], links=[[1, 2, 3]]),
        episode([page(-1)], step=None),
    ],
    ids=str,
)
def test_invalid_file_is_ignored(tmp_path: Path, content: Any) -> None:
    assert drawn(tmp_path, content) == ""


def test_invalid_links_and_excess_pages_are_omitted(tmp_path: Path) -> None:
    pages = [page(-1), *(page(0, others=10**6) for _ in range(500))]
    section = drawn(tmp_path, episode(pages, links=[[0, 700], [-3, 1], [2, 3]]))
    svg = svg_of(section)
    assert count(svg, "link") == 1
    assert count(svg, "start") == 1
    assert "the first 120 are shown" in section
    assert len(section) < 3_000_000


@pytest.mark.parametrize("shape", ["star", "chain", "bush", "one"])
def test_layout_keeps_pages_apart_and_within_the_image(shape: str) -> None:
    rng = np.random.default_rng(0)
    count = 1 if shape == "one" else 41
    parent_of = {"star": lambda n: 0, "chain": lambda n: n - 1}.get(shape, lambda n: int(rng.integers(n)))
    parents = np.array([-1, *(parent_of(n) for n in range(1, count))])
    halos = np.array([halo(int(dots)) for dots in rng.integers(0, 30, count)])
    box = (10.0, 80.0, 1090.0, 560.0)
    places, scale = fit_to_box(layout_pages(parents, halos, []), halos, box)
    assert (places - scale * halos[:, None] >= np.array(box[:2]) - 0.1).all()
    assert (places + scale * halos[:, None] <= np.array(box[2:]) + 0.1).all()
    assert scale > 0.35
    for a in range(count):
        for b in range(a):
            assert math.dist(places[a], places[b]) > 20 * scale  # far enough apart to read the numbers
