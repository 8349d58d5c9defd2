"""`/dashboard` without a browser: what is served, with which headers, to whom, and what the files refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from frontend.dashboard.routes import DIRECTORY, MEDIA_TYPES, http_totals, read_files
from model_worker.runtimes.tasks import ALIASES
from shared.messages import DeviceState, Trouble
from tests.fronts import Front
from tests.stub_broker import StubBroker, model_state
from tests.topology import ROOT, wait_for

FILES = {name: file.content.decode() for name, file in read_files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
PAGE = FILES["index.html"]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(models=("echo", "other"), workers=2) as started:
        yield started


@pytest.fixture(scope="module")
def broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=(model_state("echo"), model_state("other"))) as started:
        front.wait_joined().wait_ready()
        yield started


# --- what is served --------------------------------------------------------------------------------------------------


def test_every_file_beside_the_routes_is_served_as_what_it_is(front: Front) -> None:
    beside = {path.name for path in DIRECTORY.iterdir() if path.is_file() and path.suffix != ".py"}
    assert beside == set(FILES)
    for name, text in FILES.items():
        answer = front.get(f"/dashboard/{name}")
        assert (answer.status_code, answer.text) == (200, text)
        assert answer.headers["content-type"] == MEDIA_TYPES[name[name.rindex(".") :]]
    assert front.get("/dashboard").text == PAGE


def test_policy_allows_files_from_here_and_nothing_else(front: Front) -> None:
    for path in ("/dashboard", *(f"/dashboard/{name}" for name in FILES)):
        headers = front.get(path).headers
        policy = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        for kind in ("script-src", "style-src", "connect-src"):
            assert policy[kind] == "'self'"
        for kind in ("base-uri", "form-action", "frame-ancestors"):
            assert policy[kind] == "'none'"
        # No scheme of the network, no host, no wildcard; blobs are made by the page itself.
        assert {word for rule in policy.values() for word in rule.split()} == {"'none'", "'self'", "blob:"}
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_browser_asks_again_and_gets_only_what_has_changed(front: Front) -> None:
    first = front.get("/dashboard/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = front.get("/dashboard/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert front.get("/dashboard/style.css").headers["etag"] != first.headers["etag"]
    head = front.client.head(f"{front.url}/dashboard")
    assert (head.status_code, int(head.headers["content-length"])) == (200, len(PAGE.encode()))


@pytest.mark.parametrize(
    "path",
    [
        "routes.py",
        "__init__.py",
        "nothing.js",
        "..%2fapp.py",
        "%2e%2e%2fapp.py",
        "..%5capp.py",
        "sub/main.js",
        "main.js%00",
        "",
    ],
)
def test_only_the_pages_own_files_can_be_had(front: Front, path: str) -> None:
    status, _, body = front.get_once(f"/dashboard/{path}")
    assert status == 404
    assert b'"error_type":"not_found"' in body


# --- what the files refer to -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]


def tags() -> Tags:
    parser = Tags()
    parser.feed(PAGE)
    return parser


def test_page_has_no_script_or_style_inside() -> None:
    assert "<style" not in PAGE
    for tag, attributes in tags().found:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or attributes["src"]


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
    assert "://" not in text
    assert not re.search(r"[\"'(]//", text)
    assert "@import" not in text
    assert "url(" not in text


def test_every_reference_leads_to_something_here(front: Front, broker: StubBroker) -> None:
    parsed = tags()
    references = [entry[key] for _, entry in parsed.found for key in ("src", "href") if entry.get(key)]
    assert references
    for reference in references:
        assert reference is not None
        if reference.startswith("#"):
            assert reference[1:] in parsed.ids
        else:
            # As a browser resolves it, from the page's address.
            assert not reference.startswith("/"), "an absolute path breaks behind a proxy with a prefix"
            assert front.get(f"/{reference}").status_code == 200
    for text in SCRIPTS.values():
        for imported in re.findall(r"from \"(.+?)\"", text):
            assert imported.removeprefix("./") in SCRIPTS
    assert len(parsed.ids) == len(set(parsed.ids))
    for asked in re.findall(r"\bat\(\"([\w-]+)\"\)", SCRIPTS["main.js"]):
        assert asked in parsed.ids


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_turns_text_into_elements_or_code(name: str) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
        r"|\beval\b|new Function|javascript:|\bimport\(|localStorage|document\.cookie|sendBeacon|WebSocket"
    )
    assert not re.search(forbidden, SCRIPTS[name])


def test_no_timer_is_given_code_as_text() -> None:
    for text in SCRIPTS.values():
        assert all(re.match(r"\w+, ", call) for call in re.findall(r"setTimeout\((.{12})", text))


def test_every_class_that_a_script_names_has_its_looks() -> None:
    """A name that was changed in one place alone would go unnoticed."""
    styled = set(re.findall(r"\.([a-z][\w-]*)", FILES["style.css"]))
    named = {
        word
        for text in (PAGE, *SCRIPTS.values())
        for value in re.findall(r"class(?:=|: )\"([\w -]+)\"", text)
        for word in value.split()
    }
    assert named <= styled


def test_looks_follow_the_systems_choice_of_light_and_dark_and_of_motion() -> None:
    style = FILES["style.css"]
    colours = re.findall(r"^  --[\w-]+: (.+);$", style, re.MULTILINE)
    assert len(colours) > 15
    assert all(colour.startswith("light-dark(") for colour in colours)
    # Every colour is one of these: none is right in one scheme alone.
    rules = style.partition("}")[2]
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", rules)) <= {"#0008"}
    assert "color-scheme: light dark" in style
    assert "prefers-reduced-motion" in style


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_what_is_behind_it(scheme: int) -> None:
    """The contrast that WCAG 2 asks of text, level AA: 4.5 to 1."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", FILES["style.css"])
    colours = {name: both[scheme] for name, *both in pairs}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colours[one]), luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for ink in ("ink", "soft", "act", "good", "busy", "bad", "idle"):
        for paper in ("page", "card", "sunk"):
            assert contrast(ink, paper) >= 4.5, (ink, paper)
    assert contrast("on-act", "act") >= 4.5
    for number in range(8):
        # Curves and swatches: graphics need 3 to 1.
        assert contrast(f"c{number}", "card") >= 3, number


def test_every_task_that_was_tried_has_a_form() -> None:
    table = (ROOT / "docs" / "tasks.md").read_text().partition("## Inputs")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    served = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    forms = set(re.findall(r"^  \"?([a-z0-9-]+)\"?: (?:simple\(|\{)", SCRIPTS["tasks.js"], re.MULTILINE))
    # Those whose inputs differ from model to model are asked with JSON; a text is generated in a talk.
    with_json = {"any-to-any", "decision", "image-text-to-text", "keypoint-matching", "video-classification"}
    assert served - forms == {*with_json, "text-generation"}
    aliases = re.search(r"const ALIASES = \{ (.+) \};", SCRIPTS["tasks.js"])
    assert aliases
    assert dict(re.findall(r"\"?([\w-]+)\"?: \"([\w-]+)\"", aliases[1])) == ALIASES


# --- the data --------------------------------------------------------------------------------------------------------


def test_data_is_the_status_with_the_totals_of_all_workers(front: Front, broker: StubBroker) -> None:
    broker.devices = (DeviceState("cpu", "a name", 2**34),)
    broker.troubles = (Trouble("replica_exited", "echo/0", "crashed: killed by signal 9", 3, 1.5),)
    before = total(front.get("/dashboard/data").json())
    for number in range(20):
        with front.connect() as connection:
            body = b'{"inputs": %d}' % number
            connection.sendall(
                b"POST /models/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
                + body
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    # A request is counted behind its answer.
    wait_for(lambda: total(front.get("/dashboard/data").json()) == before + 20, "all are counted, whoever answers")
    data = front.get("/dashboard/data")
    assert data.headers["cache-control"] == "no-store"
    document = data.json()
    assert document["problem"] == ""
    assert document["front_workers"] == 2
    status = document["status"]
    assert status["devices"] == [{"device": "cpu", "name": "a name", "memory_bytes": 2**34}]
    assert status["troubles"][0]["text"] == "crashed: killed by signal 9"
    described = front.get("/status").json()
    assert {key: status[key] for key in ("models", "slots", "counters")} == {
        key: described[key] for key in ("models", "slots", "counters")
    }
    buckets = document["http"]["models"]["echo"]["seconds_buckets"]
    assert buckets["+Inf"] == total(document)
    assert list(buckets.values()) == sorted(buckets.values())


def total(document: dict[str, Any]) -> float:
    return float(sum(document["http"]["models"].get("echo", {}).get("by_status", {}).values()))


def test_without_a_model_server_the_page_is_there_and_the_data_says_why() -> None:
    with Front() as alone:
        assert alone.get("/dashboard").status_code == 200
        document = alone.get("/dashboard/data").json()
        assert document["status"] is None
        assert document["problem"]
        assert document["http"] == {"inflight": 0.0, "models": {}}


def test_data_needs_a_key_where_models_do_and_the_page_has_none() -> None:
    with Front(api_keys=["s3cret-key"]) as locked, StubBroker(locked.run_dir):
        locked.wait_ready()
        refused = locked.get("/dashboard/data")
        assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthorized")
        assert "status" not in refused.json()
        opened = locked.get("/dashboard/data", headers={"Authorization": "Bearer s3cret-key"})
        assert opened.json()["status"]["models"][0]["name"] == "echo"
        for path in ("/dashboard", *(f"/dashboard/{name}" for name in FILES)):
            answer = locked.get(path)
            assert answer.status_code == 200
            assert "s3cret-key" not in answer.text


def test_totals_add_up_over_routes_and_leave_other_families_out() -> None:
    requests = Metric("headwaiter_requests", "", "counter")
    for route, code, count in (("/a", "200", 3.0), ("/b", "200", 4.0), ("/b", "503", 1.0)):
        labels = {"model": "m", "route": route, "code": code}
        requests.add_sample("headwaiter_requests_total", labels, count)
    durations = Metric("headwaiter_request_duration_seconds", "", "histogram")
    for route in ("/a", "/b"):
        for bound, count in (("0.1", 2.0), ("+Inf", 4.0)):
            labels = {"model": "m", "route": route, "le": bound}
            durations.add_sample("headwaiter_request_duration_seconds_bucket", labels, count)
        durations.add_sample("headwaiter_request_duration_seconds_sum", {"model": "m", "route": route}, 0.5)
    inflight = Metric("headwaiter_inflight_requests", "", "gauge")
    inflight.add_sample("headwaiter_inflight_requests", {}, 2.0)
    other = Metric("something_else", "", "gauge")
    other.add_sample("something_else", {}, 9.0)
    assert http_totals([requests, durations, inflight, other]) == {
        "inflight": 2.0,
        "models": {
            "m": {
                "by_status": {"200": 7.0, "503": 1.0},
                "seconds_buckets": {"0.1": 4.0, "+Inf": 8.0},
                "seconds_sum": 1.0,
            }
        },
    }
