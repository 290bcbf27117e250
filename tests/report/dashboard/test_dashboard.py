"""The dashboard's server: pages, live data, confinement to the run folder, and access control."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest
from dashboard_runs import evaluation, iteration, make_pack, make_run, segment, serving, write_lines
from dashboard_server import events_of, get, rows_of

from unidle.cli.main import run as command_line
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.errors import UsageError
from unidle.report.dashboard import connection
from unidle.report.dashboard.page import plotly_script
from unidle.report.dashboard.rows import Rows
from unidle.report.dashboard.runs import Reader, as_json, whole_view
from unidle.report.dashboard.serve import serve

TOKEN = "0123456789abcdef"
MARKUP = "<img src=x onerror=alert(1)>"


@contextmanager
def dashboard_command(
    folder: Path, *flags: str, files: int | None = None
) -> Iterator[tuple[SplitResult, subprocess.Popen[str]]]:
    """`unidle dashboard`, which may open `files` files; yields the printed address."""
    command = [sys.executable, "-m", "unidle", "dashboard", str(folder), *flags]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "-", *command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:
        try:
            assert server.stdout is not None
            yield urlsplit(server.stdout.readline().split()[-1]), server
        finally:
            server.kill()


# -- pages ---------------------------------------------------------------------------------------------------------


def test_pages_load_only_own_files_and_set_csp(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for path in ("/", "/run/x"):
            response = get(port, path)
            assert response.status == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            loaded = re.findall(r'(?:src|href)="([^"]*)"', response.text)
            assert loaded
            assert all(re.match(r"/(static/[\w.]+\?v=\w+)?$|data:,$", address) for address in loaded), loaded
            for address in loaded:
                if address.startswith("/static"):
                    assert get(port, address).status == 200
        assert get(port, "/static/plotly.js").text == plotly_script()


def test_other_paths_and_methods_are_rejected(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for path in ("/run/y", "/run/x/metrics.jsonl", "/run/x/checkpoints", "/static/page.py", "/docs"):
            assert get(port, path).status == 404, path
        assert get(port, "/", method="POST").status == 405


def test_run_rows_show_dashes_for_unknown_values(tmp_path: Path) -> None:
    make_run(tmp_path, "a", meter=True)
    (make_run(tmp_path, "b") / "metrics.jsonl").write_text("")
    (tmp_path / "not-a-run").mkdir()
    rows = Rows()
    first, second = rows_of(tmp_path, rows)
    assert first == {
        "kind": "run",
        "path": "a",
        "name": "a",
        "note": "",
        "env": "CartPole-v1",
        "preset": "classic",
        "seed": "0",
        "date": first["date"],
        "state": "done",
        "step": "4,000",
        "total": "4k",
        "progress": 1.0,
        "rate": "1k",
        "return": "24.00",
        "busy": "40 %",
        "spark": [[1000.0, 2000.0, 3000.0, 4000.0], [21.0, 22.0, 23.0, 24.0]],
        "order": {
            "seed": 0,
            "date": first["order"]["date"],
            "step": 4000,
            "rate": 1000.0,
            "return": 24.0,
            "busy": pytest.approx(0.4),
        },
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", first["date"])
    assert (second["rate"], second["return"], second["busy"], second["state"]) == ("–", "–", "–", "stopped")
    write_lines(tmp_path / "b" / "metrics.jsonl", [iteration(1)])
    assert rows_of(tmp_path, rows)[1]["return"] == "21.00"


_ALIAS_BOMB = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in pairwise("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    "config",
    [
        "run: {timesteps: 2024-99-99}\n",
        "run: {timesteps: !!int ''}\n",
        "[" * 5000,
        f"run: {{env: [{'[' * 5000}",
        f"{_ALIAS_BOMB}run: {{env: *z}}\n",
        "a: 1\n" * 300_000,
        "\0",
    ],
    ids=["date", "integer", "brackets", "brackets in a setting", "alias bomb", "long", "NUL"],
)
def test_unreadable_config_is_shown_and_does_not_hide_other_runs(config: str, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    (make_run(tmp_path, "b") / "config.yaml").write_text(config)
    with serving(tmp_path) as port, events_of(port, "/events") as events:
        assert {row["name"]: row["state"] for row in events.next()} == {"a": "done", "b": "unreadable"}
        with events_of(port, "/run/b/events") as run:  # its page shows what can be read
            view = run.next()
            assert view["figures"][0][:2] == ["Steps", "4,000"]
            assert (view["state"], view["verdict"]) == ("unreadable", "The config.yaml of this run cannot be read.")


@pytest.mark.parametrize("file", ["metrics.jsonl", "meter.jsonl", "changes.jsonl"])
def test_hostile_records_do_not_hide_other_runs(file: str, tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    folder = make_run(tmp_path, "b")
    nested = '{"kind":' * 400 + "1" + "}" * 400
    values = [
        "[" * 100_000,
        nested,
        "1" + "0" * 400,
        "9" * 5000,
        "NaN",
        "[[[]]]",
        '{"x": {}}',
        '"\\ud800"',
        "null",
        "true",
    ]
    keys = {key for made in (iteration, evaluation, segment) for key in made(1)} | {"change"}
    records = [json.dumps(made(1))[:-1] for made in (iteration, evaluation, segment)]
    rows = Rows()
    for value in values:
        lines = [value, *(f'{record}, "{key}": {value}}}' for record in ['{"_": 0', *records] for key in keys)]
        (folder / file).write_text("".join(f"{line}\n" for line in lines))
        assert {row["name"] for row in json.loads(as_json(rows_of(tmp_path, rows)))} == {"a", "b"}, value[:20]
        as_json(whole_view(folder))  # and its own page is complete


def test_line_without_end_is_read_in_parts(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    reader = Reader(folder)
    reader.refresh()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x" * (5 << 20) + "\n" + json.dumps(iteration(5)) + "\n")
    tracemalloc.start()
    assert reader.refresh()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert reader.view()["figures"][0][1] == "5,000"


def test_locked_run_is_training_and_listed_first(tmp_path: Path) -> None:
    make_run(tmp_path, "a", seconds=2)
    folder = make_run(tmp_path, "b", seconds=2)
    rows = Rows()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [(row["name"], row["state"]) for row in rows_of(tmp_path, rows)] == [("b", "training"), ("a", "stopped")]
    assert {row["state"] for row in rows_of(tmp_path, rows)} == {"stopped"}


def test_reading_a_run_does_not_block_its_training_lock(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    (folder / ".lock").touch()
    is_reading = threading.Event()

    def read() -> None:  # like the dashboard, but for much longer
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            is_reading.set()
            time.sleep(0.04)

    thread = threading.Thread(target=read)
    thread.start()
    assert is_reading.wait(5)
    run = RunFolder.open(folder)
    run.lock()  # raises if refused
    thread.join()
    assert rows_of(tmp_path)[0]["state"] == "training"
    run.unlock()


def test_run_that_reached_target_return_is_done(tmp_path: Path) -> None:
    make_run(tmp_path, "a", seconds=2, target_return=102.0)
    make_run(tmp_path, "b", seconds=2, target_return=102.5)
    assert [row["state"] for row in rows_of(tmp_path)] == ["done", "stopped"]


def test_folder_of_one_run_shows_only_that_run(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    make_run(tmp_path, "y")
    with serving(tmp_path / "x") as port:
        assert get(port, "/run/x").status == 200
        assert get(port, "/run/y").status == 404


# -- live data -----------------------------------------------------------------------------------------------------


def test_new_record_is_sent_within_a_second_and_partial_line_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", timesteps=100_000)
    line = json.dumps(iteration(5)) + "\n"
    with serving(tmp_path) as port, events_of(port, "/run/x/events") as events, events_of(port, "/events") as rows:
        assert events.next()["figures"][0][:2] == ["Steps", "4,000"]
        assert rows.next()[0]["step"] == "4,000"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line[:40])
            file.flush()
            time.sleep(0.6)  # longer than the polling period
            file.write(line[40:])
            file.flush()
            written_at = time.monotonic()
            now = events.next()
            assert time.monotonic() - written_at < 1
            assert now["figures"][0][:2] == ["Steps", "5,000"]
            assert rows.next()[0]["step"] == "5,000"
            assert time.monotonic() - written_at < 1.5


def test_replaced_files_of_resumed_run_are_read_from_start(tmp_path: Path) -> None:
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


def test_file_rewritten_in_place_is_detected(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x")
    reader = Reader(folder)
    reader.refresh()
    write_lines(folder / "metrics.jsonl", [iteration(i) for i in range(10, 20)])
    assert reader.refresh()
    assert reader.view()["speed"]["seconds"] == [float(i) for i in range(10, 20)]


def test_invalid_lines_are_ignored(tmp_path: Path) -> None:
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


def test_spans_are_read_only_at_segment_offsets(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "x", meter=True)
    reader = Reader(folder)
    reader.refresh()
    places = reader.view()["timeline"]["offset"]
    assert places == [sum(map(len, lines)) for lines in _preceding_lines((folder / "meter.jsonl").read_bytes())]
    with serving(tmp_path) as port:
        assert json.loads(get(port, f"/run/x/spans?at={places[2]}").text) == segment(3)["spans"]
        for wrong in (str(places[2] + 1), "-1", "", "9" * 30, "%C2%B2", "0x0"):
            assert get(port, f"/run/x/spans?at={wrong}").status == 404, wrong


def _preceding_lines(text: bytes) -> list[list[bytes]]:
    lines = text.splitlines(keepends=True)
    return [lines[:i] for i in range(len(lines))]


# -- nothing outside the folder ------------------------------------------------------------------------------------


def test_paths_cannot_escape_run_folder(tmp_path: Path) -> None:
    secret = make_run(tmp_path, "secret", env="Secret-v0")
    runs = tmp_path / "runs"
    make_run(runs, "x")
    (runs / "link").symlink_to(secret)
    (runs / "alias").symlink_to(runs / "x")
    paths = ["..", "%2e%2e", "../secret", "..%2fsecret", "%2e%2e%2fsecret", "..%5csecret", "x%2f..%2f..%2fsecret", "."]
    paths += ["link", "alias", "%2f" + str(secret).strip("/").replace("/", "%2f"), "x%00", "%ff", "%ed%a0%80"]
    with serving(runs) as port:
        assert get(port, "/run/x").status == 200
        for path in paths:
            for end in ("", "/events", "/spans?at=0"):
                response = get(port, f"/run/{path}{end}")
                assert response.status == 404, path + end
                assert "Secret" not in response.text
        for path in ("/static/..%2fpage.py", "/static/../page.py", "//etc/passwd", "/../secret/config.yaml"):
            assert get(port, path).status == 404, path
        assert [row["name"] for row in rows_of(runs)] == ["x"]


def test_symlinks_within_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = make_run(tmp_path, "secret", meter=True)
    runs = tmp_path / "runs"
    run = make_run(runs, "x", seconds=1)
    for name in ("metrics.jsonl", "meter.jsonl"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret / name)
    os.mkfifo(run / "changes.jsonl")  # opening it would block
    reader = Reader(run)
    reader.refresh()
    view = reader.view()
    assert view["figures"][0][1] == "0"
    assert view["timeline"]["end"] == []
    assert rows_of(runs)[0]["step"] == "0"
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret / "config.yaml")
    assert rows_of(runs) == []


# -- access control --------------------------------------------------------------------------------------------------


def test_unknown_host_names_are_rejected(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        for name in ("127.0.0.1:8765", "localhost:8765", "localhost", "[::1]:8765", "LOCALHOST"):
            assert get(port, "/", host=name).status == 200, name
        others = ("evil.example", "127.0.0.1.evil.example:8765", "192.168.0.5", "localhost.evil.example", "", "[::2]")
        for name in others:
            for path in ("/", "/run/x", "/static/run.js", "/run/x/spans"):
                assert get(port, path, host=name).status == 403, name


def test_public_server_accepts_addresses_and_its_own_name(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0", token="word") as port:
        for name, status in (("192.168.0.5:8765", 200), ("[fe80::1]:1", 200), ("evil.example", 403)):
            assert get(port, "/?token=word", host=name).status == status, name
    with serving(tmp_path, host="box.lan", token="word") as port:
        assert get(port, "/?token=word", host="box.lan").status == 200


def test_every_request_needs_the_token(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    paths = ("/", "/events", "/run/x", "/run/x/events", "/run/x/spans", "/static/plotly.js", "/nothing")
    with serving(tmp_path, token="word", port=8765) as port:
        for path in paths:
            for wrong in ("", "?token=", "?token=wor", "?token=words", "?token=w%C3%B6rd", "?Token=word"):
                assert get(port, path + wrong).status == 401, path + wrong
        refused = get(port, "/", cookie="unidle-8765=wrong")
        assert refused.status == 401
        assert "set-cookie" not in refused.headers


def test_half_sent_requests_do_not_shut_others_out(tmp_path: Path) -> None:
    """The server may open 256 files, and 400 connections never finish their request."""
    make_run(tmp_path, "x")
    with dashboard_command(tmp_path, "--port", "0", files=256) as (address, _), ExitStack() as stack:
        assert get(address.port, f"/?{address.query}").status == 200
        parts = [b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"]
        for i in range(400):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", address.port), timeout=5))
            peer.sendall(parts[i % 3])
            if i % 50 == 49:
                assert get(address.port, f"/?{address.query}").status == 200
        with events_of(address.port, f"/run/x/events?{address.query}") as events:
            assert events.next()["name"] == "x"


def test_many_connections_of_one_peer_do_not_close_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING", 5)
    with serving(tmp_path, token=TOKEN) as port, ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.9", 0)))
        other.sendall(b"GET / HTTP/1.1\r\n")
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(20)]
        assert sum(_is_closed(peer) for peer in crowd) == 16
        other.sendall(b"Host: localhost\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 401 ")


def _is_closed(peer: socket.socket) -> bool:
    peer.settimeout(0.1)
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_request_must_arrive_in_time_however_it_trickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.3)
    with serving(tmp_path) as port, events_of(port, "/events") as events:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):  # also after an answered request
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                peer.sendall(sent)
                assert _seconds_until_closed(peer) < 2
        assert events.next() == []  # an answer that lasts longer is not cut off


def _seconds_until_closed(peer: socket.socket) -> float:
    began = time.monotonic()
    while time.monotonic() - began < 5:
        try:
            peer.sendall(b"X")
        except ConnectionError:
            break
        time.sleep(0.02)
    return time.monotonic() - began


def test_refused_request_ends_its_connection(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as port:
        for path, headers in (("/", {}), (f"/?token={TOKEN}", {"host": "evil.example"})):
            assert get(port, path, **headers).headers["connection"] == "close"


def test_token_in_url_sets_cookie(tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path, token="word", port=8765) as port:
        response = get(port, "/?token=word")
        assert response.status == 200
        assert response.headers["set-cookie"] == "unidle-8765=word; Path=/; HttpOnly; SameSite=Strict"
        assert get(port, "/run/x", cookie="a=b; unidle-8765=word").status == 200
        assert get(port, "/run/x", cookie="unidle-8765=word", host="evil.example").status == 403


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_command_creates_token_and_stops_on_ctrl_c(host: str, tmp_path: Path) -> None:
    make_run(tmp_path, "x")
    with dashboard_command(tmp_path, "--host", host, "--port", "0") as (address, server):
        assert len(address.query) >= len("token=") + 32
        assert get(address.port, "/").status == 401
        with events_of(address.port, f"/run/x/events?{address.query}") as events:
            assert events.next()["name"] == "x"
            server.send_signal(signal.SIGINT)  # with a page still open
            time.sleep(0.05)
            server.send_signal(signal.SIGINT)  # an impatient second one
            _, errors = server.communicate(timeout=10)
    assert (server.returncode, errors) == (0, "")


def test_packs_beside_the_runs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "x")
    make_pack(tmp_path / "packs", "p", [])
    make_pack(tmp_path / "elsewhere", "q", [])
    for flags, names in (((), ["x", "p"]), (("--packs", "elsewhere"), ["x", "q"])):
        with (
            dashboard_command(Path("runs"), "--port", "0", *flags) as (address, _),
            events_of(address.port, f"/events?{address.query}") as events,
        ):
            assert [row["name"] for row in events.next()] == names


def test_token_from_environment_is_used_and_not_in_the_list_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDLE_DASHBOARD_TOKEN", TOKEN)
    with dashboard_command(tmp_path, "--port", "0") as (address, server):
        assert address.query == f"token={TOKEN}"
        assert get(address.port, "/").status == 401
        assert get(address.port, f"/?{address.query}").status == 200
        assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()


def test_token_flag_warns_that_it_is_visible(tmp_path: Path) -> None:
    with dashboard_command(tmp_path, "--port", "0", "--token", TOKEN) as (address, server):
        assert get(address.port, f"/?{address.query}").status == 200
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=10)
    assert errors == "--token is visible to all users of this machine; set UNIDLE_DASHBOARD_TOKEN instead.\n"


@pytest.mark.parametrize(
    "token", ["", "word", "fifteen-letters", "two words that are long enough", "ä" * 20, "a" * 32, "1234567" * 4]
)
def test_weak_token_is_refused(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["dashboard", str(tmp_path), f"--token={token}"]) == 2
    assert "--token must be at least 16 letters, digits" in capsys.readouterr().err
    monkeypatch.setenv("UNIDLE_DASHBOARD_TOKEN", token)
    assert command_line(["dashboard", str(tmp_path)]) == 2
    assert "UNIDLE_DASHBOARD_TOKEN must be at least 16 letters, digits" in capsys.readouterr().err


def test_usage_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path) as port:
        port_in_use = ["dashboard", str(tmp_path), "--port", str(port)]
        wrong = {"cannot listen on 127.0.0.1": port_in_use}
        wrong["is not a folder"] = ["dashboard", str(tmp_path / "none")]
        wrong["--packs absent is not a folder"] = ["dashboard", str(tmp_path), "--packs", "absent"]
        wrong["--port 70000"] = ["dashboard", str(tmp_path), "--port", "70000"]
        wrong["not an address of this machine"] = ["dashboard", str(tmp_path), "--host", "no.such.host.invalid"]
        wrong["--host 192.0.2.1 is not an address"] = ["dashboard", str(tmp_path), "--host", "192.0.2.1"]
        for part, argv in wrong.items():
            assert command_line(argv) == 2
            stderr = capsys.readouterr().err
            assert part in stderr
            assert stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "plotly"])
def test_missing_package_error_names_the_extra(
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


def test_serve_without_folder_raises_before_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        serve(tmp_path / "none", "127.0.0.1", 0, None, print)


def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path, MARKUP, env=MARKUP)
    with serving(tmp_path) as port:
        response = get(port, "/run/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    assert response.status == 200
    assert "<img" not in response.text
    assert "&lt;img src=x" in response.text
