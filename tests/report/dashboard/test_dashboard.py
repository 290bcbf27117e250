"""The dashboard's server is asked as a browser would, and as somebody would who wants what it must not give."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import iteration, make_run, segment, serving, write_lines

from unidle.cli.main import run as command_line
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import UsageError
from unidle.report.dashboard.files import Runs
from unidle.report.dashboard.page import plotly_script
from unidle.report.dashboard.runs import Reader, Rows
from unidle.report.dashboard.serve import serve

NASTY = "<img src=x onerror=alert(1)>"


@dataclass
class Answer:
    status: int
    headers: Message
    text: str


def get(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """The answer to a path exactly as it is, which a client library would tidy up."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())


class Events:
    """A stream of server-sent events."""

    def __init__(self, port: int, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        self._connection.request("GET", path)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.headers["content-type"].startswith("text/event-stream")

    def next(self) -> Any:
        while not (line := self._answer.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        return json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self._connection.close()


@contextmanager
def events_of(port: int, path: str) -> Iterator[Events]:
    with closing(Events(port, path)) as events:
        yield events


# -- pages ---------------------------------------------------------------------------------------------------------


def test_pages_load_nothing_from_elsewhere_and_say_so(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for path in ("/", "/run/x"):
            answer = get(port, path)
            assert answer.status == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            loaded = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
            assert loaded
            assert all(re.match(r"/(static/[\w.]+\?v=\w+)?$|data:,$", address) for address in loaded), loaded
            for address in loaded:
                if address.startswith("/static"):
                    assert get(port, address).status == 200
        assert get(port, "/static/plotly.js").text == plotly_script()


def test_there_is_nothing_but_the_pages(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for path in ("/run/y", "/run/x/metrics.jsonl", "/run/x/checkpoints", "/static/page.py", "/docs"):
            assert get(port, path).status == 404, path
        assert get(port, "/", method="POST").status == 405


def test_a_row_of_each_run_with_a_dash_for_what_is_unknown(tmp_path: Path) -> None:
    make_run(tmp_path, "a", meter=True)
    (make_run(tmp_path, "b") / "metrics.jsonl").write_text("")
    (tmp_path / "not-a-run").mkdir()
    rows = Rows(Runs(tmp_path))
    first, second = rows.now()
    assert first == {
        "name": "a",
        "env": "CartPole-v1",
        "preset": "classic",
        "state": "done",
        "step": "4,000",
        "total": "4k",
        "progress": 1.0,
        "rate": "1k",
        "return": "24.00",
        "busy": "40 %",
    }
    assert (second["rate"], second["return"], second["busy"], second["state"]) == ("–", "–", "–", "stopped")
    write_lines(tmp_path / "b" / "metrics.jsonl", [iteration(1)])
    assert rows.now()[1]["return"] == "21.00"


@pytest.mark.parametrize("config", ["run: {timesteps: 2024-99-99}\n", "[" * 5000])
def test_a_run_that_cannot_be_read_takes_no_other_from_the_page(config: str, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    (make_run(tmp_path, "b") / "config.yaml").write_text(config)
    write_lines(make_run(tmp_path, "c") / "metrics.jsonl", [{**iteration(1), "wall": 10**400}])
    assert {row["name"] for row in Rows(Runs(tmp_path)).now()} == {"a", "b", "c"}


def test_a_run_is_training_while_its_lock_is_held_and_comes_first(tmp_path: Path) -> None:
    make_run(tmp_path, "a", seconds=2)
    folder = make_run(tmp_path, "b", seconds=2)
    rows = Rows(Runs(tmp_path))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [(row["name"], row["state"]) for row in rows.now()] == [("b", "training"), ("a", "stopped")]
    assert {row["state"] for row in rows.now()} == {"stopped"}


def test_a_look_at_a_run_keeps_nobody_from_training_in_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    (folder / ".lock").touch()
    looking = threading.Event()

    def look() -> None:  # as a dashboard does, many thousand times as long
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            looking.set()
            time.sleep(0.04)

    thread = threading.Thread(target=look)
    thread.start()
    assert looking.wait(5)
    run = RunFolder.open(folder)
    run.lock()  # raises where it is refused
    thread.join()
    assert Rows(Runs(tmp_path)).now()[0]["state"] == "training"
    run.unlock()


def test_a_run_that_reached_its_target_is_done(tmp_path: Path) -> None:
    make_run(tmp_path, "a", seconds=2, target_return=102.0)
    make_run(tmp_path, "b", seconds=2, target_return=102.5)
    assert [row["state"] for row in Rows(Runs(tmp_path)).now()] == ["done", "stopped"]


def test_the_folder_of_one_run_shows_that_run_alone(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    make_run(tmp_path, "y")
    with serving(tmp_path / "x") as port:
        assert get(port, "/run/x").status == 200
        assert get(port, "/run/y").status == 404


# -- live data -----------------------------------------------------------------------------------------------------


def test_a_new_record_arrives_within_a_second_and_half_of_one_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", timesteps=100_000)
    line = json.dumps(iteration(5)) + "\n"
    with serving(tmp_path) as port, events_of(port, "/run/x/events") as events, events_of(port, "/events") as rows:
        assert events.next()["figures"][0][:2] == ["Steps", "4,000"]
        assert rows.next()[0]["step"] == "4,000"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line[:40])
            file.flush()
            time.sleep(0.6)  # more than a look at the files takes
            file.write(line[40:])
            file.flush()
            asked = time.monotonic()
            now = events.next()
            assert time.monotonic() - asked < 1
            assert now["figures"][0][:2] == ["Steps", "5,000"]
            assert rows.next()[0]["step"] == "5,000"
            assert time.monotonic() - asked < 1.5


def test_a_resumed_run_is_told_from_its_new_beginning(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True)
    reader = Reader(folder)
    assert reader.refresh()
    assert not reader.refresh()
    for name, made in (("metrics.jsonl", iteration), ("meter.jsonl", segment)):
        fresh = folder / "fresh"
        write_lines(fresh, [made(1), made(2)])
        os.replace(fresh, folder / name)
    assert reader.refresh()
    view = reader.view()
    assert view["figures"][0][1] == "2,000"
    assert view["timeline"]["end"] == [1.0, 2.0]


def test_a_file_rewritten_in_place_is_noticed_even_if_it_is_longer(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    reader = Reader(folder)
    reader.refresh()
    write_lines(folder / "metrics.jsonl", [iteration(i) for i in range(10, 20)])
    assert reader.refresh()
    assert reader.view()["speed"]["seconds"] == [float(i) for i in range(10, 20)]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True)
    for name in ("metrics.jsonl", "meter.jsonl"):
        with (folder / name).open("a") as file:
            file.write('5\n[]\nnull\n{"step": "x"}\n{"step": NaN, "seconds": 1}\n\n\xff\n')
    (folder / "changes.jsonl").write_text('{"step": 1}\n{"step": 2000, "seconds": 2.0, "change": "workers 1 → 2"}\n')
    reader = Reader(folder)
    assert reader.refresh()
    view = reader.view()
    assert len(view["timeline"]["end"]) == 4
    assert view["changes"] == [{"steps": 2000.0, "seconds": 2.0, "joules": 300.0, "change": "workers 1 → 2"}]


def test_the_spans_of_a_segment_are_read_by_its_place_and_by_no_other(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True)
    reader = Reader(folder)
    reader.refresh()
    places = reader.view()["timeline"]["place"]
    assert places == [sum(map(len, lines)) for lines in _heads((folder / "meter.jsonl").read_bytes())]
    with serving(tmp_path) as port:
        assert json.loads(get(port, f"/run/x/spans?at={places[2]}").text) == segment(3)["spans"]
        for wrong in (str(places[2] + 1), "-1", "", "9" * 30, "%C2%B2", "0x0"):
            assert get(port, f"/run/x/spans?at={wrong}").status == 404, wrong


def _heads(text: bytes) -> list[list[bytes]]:
    lines = text.splitlines(keepends=True)
    return [lines[:i] for i in range(len(lines))]


# -- nothing outside the folder ------------------------------------------------------------------------------------


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    secret = make_run(tmp_path, "secret", env="Secret-v0")
    runs = tmp_path / "runs"
    make_run(runs, "x")
    (runs / "link").symlink_to(secret)
    (runs / "beside").symlink_to(runs / "x")
    paths = ["..", "%2e%2e", "../secret", "..%2fsecret", "%2e%2e%2fsecret", "..%5csecret", "x%2f..%2f..%2fsecret", "."]
    paths += ["link", "beside", "%2f" + str(secret).strip("/").replace("/", "%2f"), "x%00", "%ff", "%ed%a0%80"]
    with serving(runs) as port:
        assert get(port, "/run/x").status == 200
        for path in paths:
            for end in ("", "/events", "/spans?at=0"):
                answer = get(port, f"/run/{path}{end}")
                assert answer.status == 404, path + end
                assert "Secret" not in answer.text
        for path in ("/static/..%2fpage.py", "/static/../page.py", "//etc/passwd", "/../secret/config.yaml"):
            assert get(port, path).status == 404, path
        assert [row["name"] for row in Rows(Runs(runs)).now()] == ["x"]


def test_links_within_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = make_run(tmp_path, "secret", meter=True)
    runs = tmp_path / "runs"
    run = make_run(runs, "x", seconds=1)
    for name in ("metrics.jsonl", "meter.jsonl"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret / name)
    os.mkfifo(run / "changes.jsonl")  # to open it would wait for ever
    reader = Reader(run)
    reader.refresh()
    view = reader.view()
    assert view["figures"][0][1] == "0"
    assert view["timeline"]["end"] == []
    assert Rows(Runs(runs)).now()[0]["step"] == "0"
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret / "config.yaml")
    assert Rows(Runs(runs)).now() == []


# -- who may ask -----------------------------------------------------------------------------------------------------


def test_names_of_strangers_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for name in ("127.0.0.1:8765", "localhost:8765", "localhost", "[::1]:8765", "LOCALHOST"):
            assert get(port, "/", host=name).status == 200, name
        others = ("evil.example", "127.0.0.1.evil.example:8765", "192.168.0.5", "localhost.evil.example", "", "[::2]")
        for name in others:
            for path in ("/", "/run/x", "/static/run.js", "/run/x/spans"):
                assert get(port, path, host=name).status == 403, name


def test_an_open_server_answers_to_addresses_and_its_own_names(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0", token="word") as port:
        for name, status in (("192.168.0.5:8765", 200), ("[fe80::1]:1", 200), ("evil.example", 403)):
            assert get(port, "/?token=word", host=name).status == status, name
    with serving(tmp_path, host="box.lan", token="word") as port:
        assert get(port, "/?token=word", host="box.lan").status == 200


def test_with_a_token_every_request_must_carry_it(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    paths = ("/", "/events", "/run/x", "/run/x/events", "/run/x/spans", "/static/plotly.js", "/nothing")
    with serving(tmp_path, token="word", port=8765) as port:
        for path in paths:
            for wrong in ("", "?token=", "?token=wor", "?token=words", "?token=w%C3%B6rd", "?Token=word"):
                assert get(port, path + wrong).status == 401, path + wrong
        refused = get(port, "/", cookie="unidle-8765=wrong")
        assert refused.status == 401
        assert "set-cookie" not in refused.headers


def test_a_token_in_the_address_is_a_cookie_from_then_on(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path, token="word", port=8765) as port:
        answer = get(port, "/?token=word")
        assert answer.status == 200
        assert answer.headers["set-cookie"] == "unidle-8765=word; Path=/; HttpOnly; SameSite=Strict"
        assert get(port, "/run/x", cookie="a=b; unidle-8765=word").status == 200
        assert get(port, "/run/x", cookie="unidle-8765=word", host="evil.example").status == 403


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_makes_a_token_for_others_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    command = [sys.executable, "-m", "unidle", "dashboard", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        told = re.search(r"http://[^/]+:(\d+)/(\?token=\S{20,})$", server.stdout.readline().rstrip())
        assert told
        port = int(told[1])
        assert get(port, "/").status == 401
        with events_of(port, f"/run/x/events{told[2]}") as events:
            assert events.next()["name"] == "x"
            server.send_signal(signal.SIGINT)  # with a page still open
            time.sleep(0.05)
            server.send_signal(signal.SIGINT)  # an impatient second one
            _, complaints = server.communicate(timeout=10)
    assert (server.returncode, complaints) == (0, "")


def test_mistakes_get_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        taken = ["dashboard", str(tmp_path), "--port", str(port)]
        wrong = {"cannot listen on 127.0.0.1": taken}
        wrong["is not a folder"] = ["dashboard", str(tmp_path / "none")]
        wrong["letters, digits"] = ["dashboard", str(tmp_path), "--token", "two words"]
        wrong["--port 70000"] = ["dashboard", str(tmp_path), "--port", "70000"]
        wrong["not an address of this machine"] = ["dashboard", str(tmp_path), "--host", "no.such.host.invalid"]
        wrong["--host 192.0.2.1 is not an address"] = ["dashboard", str(tmp_path), "--host", "192.0.2.1"]
        for part, argv in wrong.items():
            assert command_line(argv) == 2
            said = capsys.readouterr().err
            assert part in said
            assert said.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "plotly"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path, "x")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("app", "guard", "serve"):
        monkeypatch.delitem(sys.modules, f"unidle.report.dashboard.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert command_line(["dashboard", str(tmp_path), "--port", "0"]) == 2
    assert "pip install 'unidle[dashboard]'" in capsys.readouterr().err
    if package == "plotly":
        assert command_line(["report", str(folder), "--html"]) == 2
        assert "pip install 'unidle[dashboard]'" in capsys.readouterr().err


def test_serve_refuses_what_is_no_folder_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        serve(tmp_path / "none", "127.0.0.1", 0, None, print)


def test_names_and_settings_do_not_become_markup(tmp_path: Path) -> None:
    make_run(tmp_path, NASTY, env=NASTY)
    with serving(tmp_path) as port:
        answer = get(port, "/run/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    assert answer.status == 200
    assert "<img" not in answer.text
    assert "&lt;img src=x" in answer.text
