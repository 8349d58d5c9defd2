"""`/dashboard` in a real browser: Chromium, if the machine has it, driven by Playwright, if that is installed.

The model server is a stub, so that each answer, piece and failure is what a test says; the page and the front worker
are the real ones.
"""

from __future__ import annotations

import base64
import io
import shutil
import wave
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.errors import Code
from shared.messages import DeviceState, Trouble
from tests.fronts import Front
from tests.stub_broker import Answer, Fail, Piece, Request, Step, StubBroker, model_state, silent
from tests.topology import wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium")

KEY = "s3cret-key"
EVIL = "<img src=x onerror=\"document.title='taken over'\"><script>document.title='taken over'</script>"
MODELS = (
    model_state("talker", task="text-generation"),
    model_state("classifier", task="text-classification"),
    model_state("reader", task="question-answering"),
    model_state("vectors", task="embedding"),
    model_state("sorter", task="zero-shot-classification"),
    model_state("eye", task="image-classification"),
    model_state("finder", task="object-detection"),
    model_state("cutter", task="image-segmentation"),
    model_state("ear", task="automatic-speech-recognition"),
    model_state("mouth", task="text-to-audio"),
    model_state("own", task="my_module:Own"),
    model_state("broken", task="embedding", state="failed", replicas_ready=0, reason=EVIL, required=False),
)
# One red pixel.
DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8ffff3f0005fe02fe"
    "dccc59e70000000049454e44ae426082"
)
Page = Any


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    names = tuple(model.name for model in MODELS if model.required)
    with Front(models=names, api_keys=[KEY]) as started:
        yield started


@pytest.fixture(scope="module")
def running_broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=MODELS) as started:
        started.choices = {"talker": {"chat_template": True, "parameters": ["max_new_tokens", "temperature"]}}
        started.devices = (DeviceState("cpu", "", 2**34),)
        started.troubles = (Trouble("replica_exited", "talker/0", EVIL, 2, 4.0),)
        front.wait_ready()
        yield started


@pytest.fixture
def broker(running_broker: StubBroker) -> Iterator[StubBroker]:
    yield running_broker
    running_broker.behave = silent


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # As root, which a container's user often is, Chromium runs only without its own sandbox.
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, front: Front, broker: StubBroker) -> Iterator[Callable[..., Page]]:
    """Opens the page as a new visitor; afterwards nothing may have been complained about or asked of another host."""
    contexts, complaints, asked = [], [], []

    def opened(key: str | None = KEY, width: int = 1280, **settings: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        contexts.append(context)
        context.set_default_timeout(20_000)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('headwaiter-key', '{key}')")
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(f"{front.url}/dashboard")
        if key is not None:
            page.locator("#playground-model option").first.wait_for(state="attached")
        return page

    yield opened
    titles = [page.title() for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    # Refusals of the service are shown by the browser as errors of the network; they are part of some tests.
    assert [text for text in complaints if "status of 4" not in text and "status of 5" not in text] == []
    assert all(url.startswith((f"{front.url}/", "blob:")) for url in asked)
    assert set(titles) == {"headwaiter"}


def choose(page: Page, model: str) -> None:
    page.locator("#playground-model").select_option(model)


def behaving(broker: StubBroker, *steps: Step) -> list[Request]:
    """Has the stub answer so, and returns what it will be asked."""
    asked: list[Request] = []

    def behave(request: Request) -> tuple[Step, ...]:
        asked.append(request)
        return steps

    broker.behave = behave
    return asked


def test_picture_shows_devices_slots_queues_and_troubles(open_page: Callable[..., Page]) -> None:
    page = open_page()
    picture = page.locator("#picture")
    assert picture.locator("li.slot").count() == len(MODELS)
    assert "of 16 GiB" in picture.inner_text()
    picture.get_by_text("talker/0").click()
    playwright.expect(picture.get_by_text("4242").first).to_be_visible()
    trouble = page.locator(".trouble")
    assert "a model process ended" in trouble.inner_text()
    assert "2 times" in trouble.inner_text()
    assert page.locator(".chart svg").count() == 6


def test_an_open_slot_stays_open_while_the_page_goes_on(open_page: Callable[..., Page], broker: StubBroker) -> None:
    page = open_page()
    page.locator("li.slot summary").first.click()
    asked = page.evaluate("performance.getEntriesByName(new URL('dashboard/data', location).href).length")
    wait_for(
        lambda: (
            page.evaluate("performance.getEntriesByName(new URL('dashboard/data', location).href).length") > asked + 1
        ),
        "the page has been drawn again",
    )
    assert page.locator("li.slot details[open]").count() == 1


def test_text_from_models_and_errors_never_becomes_html(open_page: Callable[..., Page], broker: StubBroker) -> None:
    page = open_page()
    playwright.expect(page.locator(".trouble .cause")).to_have_text(EVIL)
    playwright.expect(page.locator(".queues .reason").first).to_have_text(EVIL)
    choose(page, "classifier")
    behaving(broker, Answer(value=[{"label": EVIL, "score": 0.5}]))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer .bars .name")).to_have_text(EVIL)
    behaving(broker, Fail(code=Code.INVALID_INPUT, message=EVIL))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer .notice p")).to_have_text(EVIL)
    assert page.locator("main img[src=x], main script").count() == 0


def test_a_talk_is_streamed_with_the_whole_talk_and_settings_sent(
    open_page: Callable[..., Page], broker: StubBroker
) -> None:
    page = open_page()
    choose(page, "talker")
    done = {"generated_text": "It is big.", "generated_tokens": 3, "finish_reason": "stop", "prompt_tokens": 9}
    pieces = [Piece(value={"text": text}, index=index) for index, text in enumerate(("It ", "is ", EVIL))]
    asked = behaving(broker, *pieces, Answer(value=done))
    page.get_by_label("Message", exact=True).fill("What is the sea?")
    page.get_by_label("Message", exact=True).press("Enter")
    playwright.expect(page.locator(".talk .assistant")).to_have_text(f"It is {EVIL}")
    playwright.expect(page.locator(".chat [role=status]")).to_contain_text("3 tokens")
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Message", exact=True).fill("And?")
    page.get_by_role("button", name="Send").click()
    playwright.expect(page.locator(".talk .assistant")).to_have_count(2)
    wait_for(lambda: len(asked) == 2, "both messages were sent")
    assert asked[0].inputs == [{"role": "user", "content": "What is the sea?"}]
    assert [message["role"] for message in asked[1].inputs] == ["system", "user", "assistant", "user"]
    assert asked[1].parameters == {"max_new_tokens": 200, "temperature": 0.5}
    # What the model does not take is not offered.
    assert page.get_by_label("Seed").count() == 0


def test_stopping_an_answer_stops_its_work(open_page: Callable[..., Page], broker: StubBroker) -> None:
    page = open_page()
    choose(page, "talker")
    asked = behaving(broker, Piece(value={"text": "Once"}, index=0))
    page.get_by_label("Message", exact=True).fill("Tell me a story.")
    page.get_by_label("Message", exact=True).press("Enter")
    playwright.expect(page.locator(".talk .assistant")).to_have_text("Once")
    page.get_by_role("button", name="Stop").click()
    wait_for(lambda: asked[0].header.id in broker.cancelled, "the model server was told")
    playwright.expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_each_form_sends_what_its_task_takes_and_draws_the_answer(
    open_page: Callable[..., Page], broker: StubBroker
) -> None:
    page = open_page()

    def ask(model: str, answer: object) -> Request:
        choose(page, model)
        asked = behaving(broker, Answer(value=answer))
        page.get_by_role("button", name="Ask", exact=True).click()
        playwright.expect(page.locator(".answer details")).to_have_count(1)
        return asked[0]

    choose(page, "reader")
    page.get_by_label("Context").fill("Ünder 🌊 the sea, Ada waits.")
    found = ask("reader", {"answer": "Ada", "score": 0.9, "start": 17, "end": 20})
    assert found.inputs["context"] == "Ünder 🌊 the sea, Ada waits."
    playwright.expect(page.locator(".answer mark")).to_have_text("Ada")

    choose(page, "sorter")
    page.get_by_label("Candidate labels").fill("food, music ,")
    page.get_by_label("Several may be true").check()
    found = ask("sorter", {"sequence": "x", "labels": ["food", "music"], "scores": [0.8, 0.2]})
    assert found.parameters == {"candidate_labels": ["food", "music"], "multi_label": True}
    assert page.locator(".answer .bars li").count() == 2

    found = ask("vectors", [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert len(found.inputs) == 3
    assert page.locator(".likeness tbody td").all_inner_texts() == [
        "1.00", "0.00", "0.71", "0.00", "1.00", "0.71", "0.71", "0.71", "1.00",
    ]  # fmt: skip

    choose(page, "own")
    page.get_by_label("inputs, as JSON").fill('{"a": [1, 2]}')
    page.get_by_label("parameters, as JSON").fill('{"b": true}')
    found = ask("own", {"anything": EVIL})
    assert (found.inputs, found.parameters) == ({"a": [1, 2]}, {"b": True})


def test_a_picture_is_sent_as_it_is_and_shown(open_page: Callable[..., Page], broker: StubBroker) -> None:
    page = open_page()
    choose(page, "eye")
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer .notice")).to_contain_text("choose a file")
    page.get_by_label("Picture").set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": DOT})
    playwright.expect(page.locator(".preview img")).to_be_visible()
    asked = behaving(broker, Answer(value=[{"label": "a dot", "score": 0.75}]))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer .bars .name")).to_have_text("a dot")
    assert asked[0].inputs.startswith("iVBORw0KGgo")


def test_boxes_and_masks_are_drawn_over_and_beside_the_picture(
    open_page: Callable[..., Page], broker: StubBroker
) -> None:
    page = open_page()
    choose(page, "finder")
    page.get_by_label("Picture").set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": DOT})
    box = {"xmin": 0, "ymin": 0, "xmax": 1, "ymax": 1}
    behaving(broker, Answer(value=[{"label": "a dot", "score": 0.75, "box": box}]))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer .boxes rect")).to_have_count(1)
    playwright.expect(page.locator(".answer .bars .name")).to_have_text("a dot")
    choose(page, "cutter")
    page.get_by_label("Picture").set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": DOT})
    mask = base64.b64encode(DOT).decode()
    behaving(broker, Answer(value=[{"label": "sky", "score": None, "mask": mask}]))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer figure img")).to_be_visible()
    playwright.expect(page.locator(".answer figcaption")).to_have_text("sky")


def test_a_recording_is_decoded_in_the_browser_and_what_a_model_says_can_be_heard(
    open_page: Callable[..., Page], broker: StubBroker
) -> None:
    page = open_page()
    choose(page, "ear")
    recording = io.BytesIO()
    with wave.open(recording, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        # A quarter of the full range on the left, silence on the right.
        file.writeframes(b"\x00\x20\x00\x00" * 800)
    sound = {"name": "note.wav", "mimeType": "audio/wav", "buffer": recording.getvalue()}
    page.get_by_label("Recording").set_input_files(sound)
    playwright.expect(page.locator(".preview audio")).to_be_visible()
    asked = behaving(broker, Answer(value={"text": "a low note"}))
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator(".answer")).to_contain_text("a low note")
    heard = asked[0].inputs
    assert heard["sampling_rate"] == 16000
    assert len(heard["raw"]) == pytest.approx(1600, abs=16)
    # The mean of both channels.
    assert heard["raw"][800] == pytest.approx(0.125, abs=0.01)
    choose(page, "mouth")
    behaving(broker, Answer(value={"audio": [[0.0, 0.5, -0.5, 0.0] * 100], "sampling_rate": 8000}))
    page.get_by_role("button", name="Ask", exact=True).click()
    playing = page.locator(".answer audio")
    playwright.expect(playing).to_be_visible()
    page.wait_for_function("document.querySelector('.answer audio').duration > 0.04")


def test_a_form_keeps_what_was_typed_while_the_page_goes_on(open_page: Callable[..., Page]) -> None:
    page = open_page()
    choose(page, "classifier")
    page.get_by_label("Text").fill("half a senten")
    with page.expect_response(lambda response: response.url.endswith("dashboard/data")):
        pass
    with page.expect_response(lambda response: response.url.endswith("dashboard/data")):
        pass
    assert page.get_by_label("Text").input_value() == "half a senten"
    assert page.evaluate("document.activeElement.name") == "text"


def test_a_key_is_asked_for_used_and_kept_in_this_tab_alone(open_page: Callable[..., Page], front: Front) -> None:
    page = open_page(key=None)
    dialog = page.get_by_role("dialog")
    playwright.expect(dialog).to_be_visible()
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_label("Key").press("Enter")
    playwright.expect(page.locator("#key-reason")).to_have_text("The service does not know this key.")
    dialog.get_by_label("Key").fill(KEY)
    dialog.get_by_label("Key").press("Enter")
    playwright.expect(page.locator("#health .pill")).to_have_text("ready, without broken")
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    assert KEY not in page.content()
    page.get_by_role("button", name="API key").click()
    dialog.get_by_role("button", name="Forget it").click()
    playwright.expect(page.locator("#health .pill")).to_have_text("needs an API key")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_screen(open_page: Callable[..., Page], width: int, scheme: str) -> None:
    page = open_page(width=width, color_scheme=scheme)
    for model in ("talker", "reader", "eye"):
        choose(page, model)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Something that a thumb can hit.
    page.locator("#playground-model").scroll_into_view_if_needed()
    box = page.locator("#playground-model").bounding_box()
    assert box["height"] >= 30


def test_everything_can_be_reached_and_done_with_the_keyboard(
    open_page: Callable[..., Page], broker: StubBroker
) -> None:
    page = open_page()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "(e => e.id || e.name || (e.tagName + '.' + e.className.toString()))(document.activeElement)"
        )
        reached.add(name)
    assert {"pause", "key", "traffic-model", "traffic-span", "playground-model", "BUTTON.main"} <= reached
    chart = page.locator(".chart svg").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator(".chart .when").first).to_contain_text("s ago")
    page.keyboard.press("Tab")
    playwright.expect(page.locator(".chart .when")).to_have_count(0)


def test_charts_show_the_requests_that_were_answered(open_page: Callable[..., Page], broker: StubBroker) -> None:
    page = open_page()
    choose(page, "classifier")
    behaving(broker, Answer(value=[{"label": "good", "score": 1.0}]))
    rate = page.locator(".chart").first.locator(".entry", has_text="classifier").locator("b")

    def moved() -> bool:
        page.get_by_role("button", name="Ask", exact=True).click()
        playwright.expect(page.locator(".answer .bars")).to_have_count(1)
        return rate.inner_text() not in ("–", "0")

    wait_for(moved, "the rate of the model is above zero")
    assert "per second" in page.locator(".chart").first.inner_text()


def test_a_service_that_stops_answering_is_told_and_the_page_goes_on(
    open_page: Callable[..., Page], front: Front
) -> None:
    page = open_page()
    page.route("**/dashboard/data", lambda route: route.fulfill(status=503, body='{"error": "away"}'))
    playwright.expect(page.locator("#notice")).to_contain_text("away")
    page.unroute("**/dashboard/data")
    playwright.expect(page.locator("#health .pill")).to_have_text("ready, without broken")
    playwright.expect(page.locator("#notice")).to_be_empty()
