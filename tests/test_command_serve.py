"""`headwaiter serve` as people run it: it comes up, answers, is operated, and ends without a trace."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from model_worker.commands.checks import OPEN_FILES_MIN
from model_worker.commands.exits import Exit
from model_worker.commands.progress import progress_table
from model_worker.commands.supervision import PERMANENT_EXIT_CODES, Program, early_refusal
from shared.messages import SlotState, Snapshot
from shared.sockets import RunDirectory
from shared.version import VERSION
from tests.command_line import COMMAND, ECHO, document, environment, headwaiter, only_line, write_config
from tests.serving import (
    SUPERVISORCTL,
    Serving,
    closing,
    descendants,
    in_terminal,
    read_available,
    serving,
    short_directory,
)
from tests.topology import ROOT, alive, children, free_port, wait_for


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    """One service for the tests that leave it running."""
    with serving(http={"port": 0, "workers": 2}) as started:
        started.wait_ready()
        yield started
        pids = started.everything()
        started.signal(signal.SIGTERM)
        assert started.wait_end() == Exit.OK
        started.wait_gone(pids)
        assert started.left_files() == []


def test_port_zero_takes_a_free_one_and_names_it(service: Serving) -> None:
    assert not service.wait_ready().endswith(":0")


def test_once_it_says_ready_the_first_request_is_answered(service: Serving) -> None:
    response = service.ask({"do": "echo", "value": 7})
    assert response.status_code == 200, response.text
    assert f"curl {service.wait_ready()}/models/echo" in service.out


def test_status_shows_each_slot_with_its_process(service: Serving) -> None:
    completed = headwaiter("status", "--json", cwd=service.cwd)
    assert completed.returncode == Exit.OK, completed.stderr
    found = document(completed)
    assert found["reachable"] is True
    assert found["plan_differences"] == []
    assert found["pid"] == service.program("model_worker")
    [slot] = found["slots"]
    assert (slot["slot"], slot["device"], slot["state"], slot["loads"]) == ("echo/0", "cpu", "ready", 1)
    assert [slot["pid"]] == service.model_pids()

    def table() -> str:
        return headwaiter("status", cwd=service.cwd).stdout

    assert "echo/0" in table()
    # A connection that a worker has given up counts until it has been silent for some seconds.
    wait_for(lambda: "2 front workers" in table(), "both front workers are counted")


def test_status_says_where_the_configuration_has_moved_on(service: Serving) -> None:
    original = (service.cwd / "headwaiter.toml").read_text()
    try:
        write_config(service.cwd, {**ECHO, "replicas": 2}, {**ECHO, "name": "new"})
        differences = document(headwaiter("status", "--json", cwd=service.cwd))["plan_differences"]
    finally:
        (service.cwd / "headwaiter.toml").write_text(original)
    assert ["echo/1" in differences[0], "new/0" in differences[1]] == [True, True]


def test_check_beside_the_running_service_finds_it_and_fails_nothing(service: Serving) -> None:
    same = {"HEADWAITER_HTTP__PORT": port_of(service)}
    checked = headwaiter("check", "--json", cwd=service.cwd, variables=same)
    assert checked.returncode == Exit.OK, checked.stdout
    points = {finding["point"]: finding for finding in document(checked)}
    assert (points["port"]["outcome"], points["run directory"]["outcome"]) == ("ok", "ok")
    assert f"this very service: model server {service.program('model_worker')}, up" in points["run directory"]["detail"]
    front = service.program("frontend")
    pids = [int(pid) for pid in re.findall(r"process (\d+)", points["port"]["detail"])]
    assert "this very service" in points["port"]["detail"]
    assert set(pids) & {front, *children(front)}
    # The port of the service, and the run directory of another one.
    other = same | {"HEADWAITER_RUN_DIR": str(service.cwd / "other")}
    points = {each["point"]: each for each in document(headwaiter("check", "--json", cwd=service.cwd, variables=other))}
    assert (points["port"]["outcome"], points["run directory"]["outcome"]) == ("fail", "ok")


def test_what_the_programs_write_is_kept_and_can_be_asked_for(service: Serving) -> None:
    address, headers = service.wait_ready(), {"X-Request-Id": "of-this-test"}
    failed = httpx.post(f"{address}/models/echo", json={"inputs": {"do": "fail"}}, headers=headers)
    assert failed.status_code == 500

    def logs(*arguments: str) -> list[str]:
        completed = headwaiter("logs", *arguments, cwd=service.cwd)
        assert completed.returncode == Exit.OK, completed.stderr
        return completed.stdout.splitlines()

    wait_for(lambda: logs("echo", "--request", "of-this-test"), "the model process tells of it")
    assert all("of-this-test" in line or line.startswith(" ") for line in logs("--request", "of-this-test"))
    assert any("server_started" in line for line in logs("model_worker", "--lines", "1000"))
    assert any("front_started" in line for line in logs("frontend", "--lines", "1000"))
    assert set(logs("--lines", "1000")) <= set(service.error.splitlines())


def test_the_log_is_followed_until_ctrl_c(service: Serving) -> None:
    command = [*COMMAND, "logs", "echo", "--lines", "0", "--follow"]
    with subprocess.Popen(command, cwd=service.cwd, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout
        assert output is not None

        def told() -> bool:
            service.ask({"do": "fail", "text": "to be followed"})
            return bool(select.select([output], [], [], 0.1)[0])

        wait_for(told, "a line comes")
        assert "echo/0" in output.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == Exit.OK


def test_a_second_instance_is_refused_and_leaves_the_first_alone(service: Serving) -> None:
    before = sorted(service.everything())
    other_port = {"HEADWAITER_HTTP__PORT": str(free_port())}
    completed = headwaiter("serve", cwd=service.cwd, variables=other_port)
    assert completed.returncode == Exit.CONFIGURATION
    line = only_line(completed.stderr)
    assert f"process {service.program('model_worker')} of headwaiter serve, process {service.process.pid}" in line
    same_port = headwaiter("serve", cwd=service.cwd, variables={"HEADWAITER_HTTP__PORT": port_of(service)})
    assert f"of headwaiter serve, process {service.process.pid}" in only_line(same_port.stderr)
    assert sorted(service.everything()) == before
    assert service.ask({"do": "echo"}).status_code == 200


def port_of(service: Serving) -> str:
    return service.wait_ready().rpartition(":")[2]


def test_what_the_refusal_of_a_second_instance_advises_makes_one_possible(directory: Path) -> None:
    default, named = {"XDG_RUNTIME_DIR": str(directory)}, {"HEADWAITER_RUN_DIR": str(directory / "run")}
    for variables, remedy in ((default, "HEADWAITER_NAME"), (named, "HEADWAITER_RUN_DIR")):
        taken = RunDirectory(directory / ("headwaiter-headwaiter" if variables is default else "run"))
        taken.prepare()
        taken.lock()
        try:
            assert remedy in run_directory_point(directory, variables)["detail"]
            other = variables | {remedy: "other" if remedy == "HEADWAITER_NAME" else str(directory / "other")}
            assert run_directory_point(directory, other)["outcome"] == "ok"
        finally:
            taken.release()


def run_directory_point(directory: Path, variables: dict[str, str]) -> dict[str, str]:
    points = document(headwaiter("check", "--json", "-m", "m:M", cwd=directory, variables=variables))
    return next(point for point in points if point["point"] == "run directory")


def test_restarting_the_front_leaves_every_model_process_alone(service: Serving) -> None:
    models, front = service.model_pids(), service.program("frontend")
    service.supervisorctl("restart", "frontend")
    assert service.program("frontend") != front
    wait_for(lambda: answers(service), "the new front answers")
    assert service.model_pids() == models


def test_restarting_the_model_server_leaves_every_front_worker_alone(service: Serving) -> None:
    models, front = service.model_pids(), service.program("frontend")
    workers = children(front)
    service.supervisorctl("restart", "model_worker")
    wait_for(lambda: answers(service), "the new model server answers")
    assert (service.program("frontend"), children(front)) == (front, workers)
    assert not set(service.model_pids()) & set(models)
    assert not any(alive(pid) for pid in models)


def test_a_front_worker_can_be_added_and_removed(service: Serving) -> None:
    models, front = service.model_pids(), service.program("frontend")
    count = len(children(front))
    service.supervisorctl("signal", "TTIN", "frontend")
    wait_for(lambda: len(children(front)) == count + 1, "one worker more")
    service.supervisorctl("signal", "TTOU", "frontend")
    wait_for(lambda: len(children(front)) == count, "one worker fewer")
    assert service.model_pids() == models


def answers(service: Serving) -> bool:
    try:
        return service.ask({"do": "echo"}).status_code == 200
    except httpx.TransportError:
        return False


# --- starts and ends ---------------------------------------------------------------------------------------------


def test_flags_alone_are_enough_and_ctrl_c_is_a_clean_exit(directory: Path) -> None:
    (directory / "mine.py").write_text(
        "class Shout:\n"
        "    def load(self, device): pass\n"
        "    def forward(self, items): return [item.upper() for item in items]\n"
    )
    arguments = ["--model", "mine:Shout", "--device", "cpu", "--port", str(free_port()), "--workers", "1"]
    variables = {"HEADWAITER_RUN_DIR": str(directory / "run")}
    with closing(Serving(*arguments, cwd=directory, variables=variables)) as service:
        service.wait_ready()
        response = service.ask("hello", model="Shout")
        assert (response.status_code, "HELLO" in response.text) == (200, True), response.text
        pids = service.everything()
        assert len(pids) >= 5
        service.signal(signal.SIGINT)
        assert service.wait_end() == Exit.OK
        assert not any(alive(pid) for pid in pids)
        assert service.left_files() == []
        assert service.out.splitlines()[-1] == "stopped"


def test_ctrl_c_during_the_start_is_a_clean_exit_too() -> None:
    with serving() as service:
        wait_for(lambda: children(service.process.pid), "supervisord has been started")
        pids = service.everything()
        service.signal(signal.SIGINT)
        assert service.wait_end() == Exit.OK
        service.wait_gone(pids)
        assert service.left_files() == []


def test_ctrl_c_lets_a_request_finish_and_a_second_one_does_not() -> None:
    with serving() as service, ThreadPoolExecutor() as pool:
        service.wait_ready()
        running = pool.submit(service.ask, {"do": "sleep", "seconds": 60}, timeout_s=90)
        wait_for(lambda: busy(service), "the request runs")
        pids = service.everything()
        service.signal(signal.SIGINT)
        service.wait_for_words("SIGINT: stopping")
        assert service.process.poll() is None
        assert not running.done()
        service.signal(signal.SIGINT)
        assert service.wait_end() == Exit.FAILED
        assert not any(alive(pid) for pid in pids)
        assert service.left_files() == []
        with pytest.raises(httpx.TransportError):
            running.result()


def busy(service: Serving) -> bool:
    [slot] = document(headwaiter("status", "--json", cwd=service.cwd))["slots"]
    return bool(slot["batches"])


def test_stop_at_once_works_on_a_supervisord_that_hangs() -> None:
    with serving() as service:
        service.wait_ready()
        pids = service.everything()
        os.kill(service.supervisord, signal.SIGSTOP)
        service.signal(signal.SIGINT)
        service.wait_for_words("SIGINT: stopping")
        service.signal(signal.SIGINT)
        assert service.wait_end() == Exit.FAILED
        assert not any(alive(pid) for pid in pids)
        assert service.left_files() == []


@pytest.mark.parametrize("victim", ["serve", "supervisord"])
def test_whoever_is_killed_nothing_stays_behind(victim: str) -> None:
    with serving() as service:
        service.wait_ready()
        pids = service.everything()
        model_server = service.program("model_worker")
        os.kill(service.process.pid if victim == "serve" else service.supervisord, signal.SIGKILL)
        code = service.wait_end()
        if victim == "supervisord":
            assert code == Exit.FAILED
            assert "supervisord ended by signal SIGKILL" in service.error.splitlines()[-1]
            # It has waited, so that a start that follows at once is not refused.
            assert not alive(model_server)
            assert service.left_files() == []
        service.wait_gone(pids)
        # Whatever files are left do not keep the next one from starting.
        with closing(Serving(cwd=service.cwd)) as following:
            following.wait_ready()
            assert following.ask({"do": "echo"}).status_code == 200


def test_if_no_model_can_load_it_ends_with_the_cause_as_its_last_line() -> None:
    # A program that ends within its first two seconds is started again, unless serve is quick to prevent it.
    model = {**ECHO, "options": {"load_error": "no such weights", "load_seconds": 3.0}}
    with serving(model, server={"load_attempts_max": 1}) as service:
        pids = [service.process.pid]
        assert service.wait_end() == Exit.FAILED
        *log, last = service.error.splitlines()
        assert last.startswith("headwaiter: no model can be loaded: echo: ")
        assert "no such weights" in last
        # It has started everything once, and the cause is told once by each who has something to say about it.
        assert events(log).count("server_started") == 1
        telling = [line for line in log if "no such weights" in line]
        assert events(telling) == ["replica_left", "model_failed"]
        # All that is left of the lines is the one at the end of the stack.
        assert [line.strip() for line in telling if line.startswith(" ")] == ["RuntimeError: no such weights"]
        assert service.left_files() == []
        service.wait_gone(pids)


def test_what_waits_when_no_model_can_load_is_told_so_and_delays_no_end() -> None:
    model = {**ECHO, "options": {"load_error": "no such weights", "load_seconds": 3.0}}
    port = free_port()
    url = f"http://127.0.0.1:{port}/models/echo"
    answers: list[httpx.Response] = []

    def keep_asking() -> None:
        # Also while and after the model server ends, until the front has stopped to listen.
        with contextlib.suppress(httpx.TransportError):
            while True:
                answers.append(httpx.post(url, json={"inputs": {"do": "echo"}}, timeout=120))

    http = {"port": port, "grace_s": 500, "request_timeout_s": 500}
    with serving(model, server={"load_attempts_max": 1}, http=http) as service, ThreadPoolExecutor() as pool:
        wait_for(lambda: knows_model(url, service), "the front has heard of the model")
        asking = [pool.submit(keep_asking) for _ in range(4)]
        assert service.wait_end() == Exit.FAILED
        for asked in asking:
            asked.result(10)
    assert len(answers) > len(asking), "some were asked after the first ones were told"
    # A connection that comes as the front stops to listen is told that, whoever it wanted to ask.
    told = [answer for answer in answers if answer.json()["error_type"] != "draining"]
    assert told[: len(asking)] == answers[: len(asking)]
    assert {(answer.status_code, answer.json()["error_type"]) for answer in told} == {(503, "model_failed")}
    assert all("no such weights" in answer.text for answer in told)
    assert not any("retry-after" in answer.headers for answer in told)


def knows_model(url: str, service: Serving) -> bool:
    assert service.process.poll() is None, service.error
    try:
        return bool(httpx.get(url).json()["state"] == "loading")
    except httpx.TransportError:
        return False


def events(log: list[str]) -> list[str]:
    """The names of the events in lines of the programs' logs, in order of the alphabet of the programs."""
    told = [line.split()[3:5] for line in log if line[:2] == "20" and len(line.split()) > 4]
    return [event for _, event in sorted(told)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"2026-01-31 10:00:00,123 WARN exited: model_worker (exit status 70; not expected)\n", 70),
        (b"2026-01-31 10:00:00,123 WARN exited: frontend (exit status 78; not expected)\n", 78),
        (b"2026-01-31 10:00:00,123 WARN exited: frontend (exit status 1; not expected)\n", None),
        (b"2026-01-31 10:00:00.123 INFO front said: exited: frontend (exit status 78; not expected)\n", None),
    ],
)
def test_only_an_exit_that_no_start_can_mend_is_a_refusal(line: bytes, code: int | None) -> None:
    program = early_refusal(line)
    assert (program and program.exit_status) == code


@pytest.mark.parametrize(
    ("state", "exit_status", "given_up"),
    [("EXITED", 70, True), ("EXITED", 78, True), ("EXITED", -1, False), ("EXITED", 0, False), ("FATAL", 1, True)],
)
def test_a_program_between_its_death_and_its_next_start_has_not_given_up(
    state: str, exit_status: int, given_up: bool
) -> None:
    assert Program("model_worker", state, 0, exit_status).given_up is given_up


def test_the_exit_codes_that_no_start_can_mend_are_those_of_the_shipped_file() -> None:
    shipped = configparser.RawConfigParser()
    shipped.read(ROOT / "supervisord.conf")
    for program in ("program:model_worker", "program:frontend"):
        assert shipped.get(program, "exitcodes") == ",".join(map(str, PERMANENT_EXIT_CODES))


@pytest.mark.parametrize("program", ["frontend", "model_worker"])
def test_a_program_that_refuses_to_run_is_started_once(directory: Path, program: str) -> None:
    # Python runs this file at the start of every process.
    (directory / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if {program!r} in sys.orig_argv:\n"
        "    print('headwaiter: this is refused', file=sys.stderr, flush=True)\n"
        "    open('starts', 'a').write('x')\n"
        "    os._exit(78)\n"
    )
    write_config(directory, ECHO, http={"port": free_port(), "workers": 1})
    with closing(Serving(cwd=directory, variables={"PYTHONPATH": str(directory)})) as service:
        assert service.wait_end() == Exit.FAILED
        assert service.error.splitlines()[-1] == "headwaiter: this is refused"
        assert service.error.count("this is refused") == 1
        assert (directory / "starts").read_text() == "x"


def test_a_model_that_is_not_required_and_broken_is_failed_while_the_others_serve() -> None:
    gone = {"name": "gone", "model": "./gone", "task": "embedding", "device": "cpu", "required": False}
    with serving(ECHO, gone) as service:
        service.wait_ready()
        assert re.search(r"^Ready on \S+ with 1 of 2 models$", service.out, re.MULTILINE)
        assert "gone cannot be served: gone/0: model = " in service.error
        # What a table would show of a slot, a pipe is told as well.
        assert "gone/0 on cpu: failed: model = " in service.out
        assert httpx.get(f"{service.wait_ready()}/readyz").status_code == 200
        assert service.ask({"do": "echo", "value": 1}).json() == 1
        answer = service.ask("x", model="gone")
        assert (answer.status_code, "no such file or directory" in answer.text) == (503, True)
        status = headwaiter("status", cwd=service.cwd)
        assert status.returncode == Exit.OK
        assert f"{service.cwd}/gone" in status.stdout
        findings = document(headwaiter("check", "--json", cwd=service.cwd))
        [finding] = [point for point in findings if point["point"] == "model gone"]
        assert (finding["outcome"], "no such file" in finding["detail"]) == ("warn", True)
        assert headwaiter("plan", cwd=service.cwd).returncode == Exit.OK
        service.signal(signal.SIGTERM)
        assert service.wait_end() == Exit.OK


def test_one_model_that_fails_does_not_keep_the_others_from_serving() -> None:
    bad = {**ECHO, "name": "bad", "options": {"load_error": "no such weights"}}
    with serving(ECHO, bad, server={"load_attempts_max": 1}) as service:
        service.wait_ready()
        assert re.search(
            r"^Serving on \S+ with 1 of 2 models; not ready without bad, which is required$", service.out, re.MULTILINE
        )
        assert httpx.get(f"{service.wait_ready()}/readyz").status_code == 503
        assert "bad cannot be served: " in service.error
        assert service.ask({"do": "echo"}).status_code == 200
        assert headwaiter("status", cwd=service.cwd).returncode == Exit.NOT_READY
        service.signal(signal.SIGTERM)
        assert service.wait_end() == Exit.OK


def test_folders_with_our_names_beside_the_users_class_do_no_harm() -> None:
    """In the working directory, which is the first on Python's path, and in `python_path`, which is the last."""
    with short_directory() as directory:
        for package in ("shared", "frontend", "model_worker"):
            (directory / package).mkdir()
            (directory / package / "__init__.py").write_text("raise RuntimeError('this is not ours')\n")
        (directory / "own.py").write_text(
            "from headwaiter import Model\n"
            "class Own(Model):\n"
            "    def load(self, device): pass\n"
            "    def forward(self, items): return [item + 1 for item in items]\n"
        )
        own = {"name": "own", "model": "own:Own", "device": "cpu"}
        top = {"python_path": [directory]}
        write_config(directory, own, http={"port": free_port(), "workers": 1}, top=top)
        with closing(Serving(cwd=directory)) as service:
            service.wait_ready()
            assert service.ask(41, model="own").json() == 42
            service.signal(signal.SIGTERM)
            assert service.wait_end() == Exit.OK


def test_in_a_terminal_it_draws_and_a_typed_ctrl_c_ends_it(directory: Path) -> None:
    write_config(directory, ECHO, http={"port": free_port(), "workers": 1})
    process, terminal = in_terminal([*COMMAND, "serve"], directory, {})
    seen = bytearray()

    def shows(words: bytes) -> bool:
        seen.extend(read_available(terminal))
        assert process.poll() is None, seen.decode()
        return words in seen

    try:
        wait_for(lambda: shows(b"Ready on"), "it says that it is ready", 60)
        assert b"\x1b[" in seen
        os.write(terminal, b"\x03")
        seen_before = len(seen)
        assert process.wait(60) == Exit.OK
        seen.extend(read_available(terminal))
        assert b"stopped" in seen[seen_before:]
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("streams", [">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_nothing_depends_on_what_it_writes_being_read_or_kept(directory: Path, streams: str) -> None:
    port = free_port()
    write_config(directory, ECHO, http={"port": port, "workers": 1})
    command = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *COMMAND, "serve"]
    with subprocess.Popen(command, cwd=directory, env=environment(), start_new_session=True) as process:
        try:
            wait_for(lambda: succeeds(f"http://127.0.0.1:{port}/readyz"), "it is ready", 60)
            [model_server] = [pid for pid in descendants(process.pid) if is_program(pid, "model_worker")]
            os.kill(model_server, signal.SIGKILL)
            wait_for(lambda: not alive(model_server), "the model server is gone")
            response = httpx.post(f"http://127.0.0.1:{port}/models/echo", json={"inputs": {"do": "echo", "value": 1}})
            assert response.json() == 1
            process.terminate()
            assert process.wait(60) == Exit.OK
        finally:
            process.kill()


def succeeds(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def is_program(pid: int, module: str) -> bool:
    return f"\0-m\0{module}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_more_slots_than_the_terminal_has_lines_are_drawn_as_what_happens_and_a_count() -> None:
    states = ["ready"] * 40 + ["loading", "failed"] + ["vacant"] * 58
    slots = tuple(
        SlotState(f"m/{number}", "m", "cpu", 0, 1, state, "", 0, 0, 0, 0, 0, 0, -1.0, 0)
        for number, state in enumerate(states)
    )
    snapshot = Snapshot(1, "epoch", 1, VERSION, 0.0, False, (), slots, (), 0, 0)
    assert progress_table(snapshot, 100).row_count == 100
    few = progress_table(snapshot, 20)
    assert [str(cell) for cell in few.columns[0].cells] == ["m/40", "m/41", "98 more"]
    assert [str(cell) for cell in few.columns[2].cells] == ["loading", "failed", "40 ready, 58 vacant"]


# --- refusals: nothing is started --------------------------------------------------------------------------------


def refused(directory: Path, *arguments: str, variables: dict[str, str] | None = None) -> str:
    """The one line that `serve` refuses with."""
    completed = headwaiter("serve", *arguments, cwd=directory, variables=variables)
    assert completed.returncode == Exit.CONFIGURATION, completed.stderr
    assert completed.stdout == ""
    assert not list((directory / "run").glob("super*"))
    return only_line(completed.stderr)


def test_a_port_in_use_is_refused_with_its_holder(directory: Path) -> None:
    write_config(directory, ECHO)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        line = refused(directory, "--port", str(port))
    assert f"http.port = {port}" in line
    assert f"process {os.getpid()}" in line
    assert "--port" in line


def test_a_host_that_is_not_ours_is_refused(directory: Path) -> None:
    write_config(directory, ECHO)
    assert "192.0.2.1" in refused(directory, "--host", "192.0.2.1")


def test_a_run_directory_that_cannot_be_made_is_refused(directory: Path) -> None:
    write_config(directory, ECHO, http={"port": 0}, top={"run_dir": "/dev/null/run"})
    assert "/dev/null/run" in refused(directory)


def test_a_run_directory_too_long_for_a_socket_is_refused(directory: Path) -> None:
    write_config(directory, ECHO, http={"port": 0}, top={"run_dir": directory / ("x" * 70)})
    line = refused(directory)
    assert "x" * 70 in line
    assert "HEADWAITER_RUN_DIR" in line


def test_a_run_directory_open_to_others_is_refused(directory: Path) -> None:
    (directory / "run").mkdir()
    (directory / "run").chmod(0o755)
    write_config(directory, ECHO, http={"port": 0})
    assert "chmod 700" in refused(directory)


def test_a_run_directory_in_use_is_refused_with_its_holder(directory: Path) -> None:
    write_config(directory, ECHO, http={"port": 0})
    run_directory = RunDirectory(directory / "run")
    run_directory.prepare()
    run_directory.lock()
    try:
        assert f"process {os.getpid()}" in refused(directory)
    finally:
        run_directory.release()


def test_too_few_open_files_are_refused(directory: Path) -> None:
    write_config(directory, ECHO, http={"port": 0})
    command = ["/bin/sh", "-c", f'ulimit -n {OPEN_FILES_MIN - 1}; exec "$@"', "sh", *COMMAND, "serve"]
    completed = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == Exit.CONFIGURATION
    assert "ulimit -Hn" in only_line(completed.stderr)


def test_supervisord_asks_for_no_more_open_files_than_the_check_before_it() -> None:
    shipped = configparser.RawConfigParser()
    shipped.read(ROOT / "supervisord.conf")
    assert shipped.getint("supervisord", "minfds") == OPEN_FILES_MIN


def test_a_class_that_does_not_exist_is_refused(directory: Path) -> None:
    write_config(directory, {**ECHO, "model": "tests.obedient_model:Disobedient"}, http={"port": 0})
    assert "Disobedient" in refused(directory)


def test_status_without_a_server_says_so_and_exits_with_69(directory: Path) -> None:
    write_config(directory, ECHO)
    completed = headwaiter("status", "--json", cwd=directory)
    assert completed.returncode == Exit.UNAVAILABLE
    assert json.loads(completed.stdout)["reachable"] is False
    assert "headwaiter serve" in only_line(completed.stderr)


def test_the_shipped_configuration_works_without_the_command(directory: Path) -> None:
    """`supervisord -n -c supervisord.conf` in a directory of the user's, and supervisorctl with the same file."""
    port = free_port()
    write_config(directory, ECHO, http={"port": port, "workers": 1})
    configuration = str(ROOT / "supervisord.conf")
    with (directory / "log").open("wb") as log:
        supervisord = subprocess.Popen(
            [sys.executable, SUPERVISORCTL.with_name("supervisord"), "-n", "-c", configuration],
            cwd=directory,
            env=environment({"HEADWAITER_PYTHON": sys.executable}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def ready() -> bool:
        assert supervisord.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        return False

    try:
        wait_for(ready, "the service is ready", 60)
        told = subprocess.run(
            [sys.executable, SUPERVISORCTL, "-c", configuration, "status"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert [line.split()[0] for line in told.stdout.splitlines()] == ["frontend", "model_worker"]
        pids = [supervisord.pid, *descendants(supervisord.pid)]
        supervisord.terminate()
        assert supervisord.wait(60) == 0
        assert not any(alive(pid) for pid in pids)
        written = (directory / "log").read_text()
        # The file was opened with `>`, not `>>`; still nobody has written over the lines of another.
        for line in ("success: model_worker entered RUNNING state", " server_started ", "stopped: frontend"):
            assert line in written
        assert "\0" not in written
        assert all(line[:4].isdigit() for line in written.splitlines() if " INFO " in line or " WARN " in line)
        # Only about running as root, which a user named on the command line would silence.
        assert "authentication" not in (directory / "log").read_text()
    finally:
        for pid in (*reversed(descendants(supervisord.pid)), supervisord.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        supervisord.wait()
