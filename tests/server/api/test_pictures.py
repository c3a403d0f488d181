"""Pictures in the APIs' formats, by the real packages and a tiny model that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.models import reference
from tests.pictures import (
    data_url,
    encode,
    expected_answer,
    in_base64,
    picture,
    picture_checkpoint,
)
from tests.server.conftest import NAME, Running, fake_engine, launch
from tests.server.rig import Served

DATA = encode(picture(100, 70))
NEW = 6
CHAT = "/v1/chat/completions"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def source(**values: Any) -> dict[str, Any]:
    data = {"type": "base64", "media_type": "image/png", "data": in_base64(DATA)}
    return {"type": "image", "source": {**data, **values}}


QUESTION = {"type": "text", "text": "What is this?"}


def chat(*parts: Any) -> dict[str, Any]:
    message = {"role": "user", "content": [*parts, QUESTION]}
    return {"model": NAME, "messages": [message], "max_tokens": NEW, "temperature": 0}


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    """A server over the tiny model that reads pictures."""
    served = Served(picture_checkpoint(), context=600)
    served.engine.end_ids = ()
    running = launch(served.engine)  # type: ignore[arg-type]
    yield running
    running.stop()
    served.close()


@pytest.fixture(scope="module")
def expected(seeing: Running) -> str:
    folder = picture_checkpoint()
    messages = [{"role": "user", "content": [{"type": "image"}, QUESTION]}]
    out = expected_answer(reference(folder), folder, messages, [picture(100, 70)], NEW)
    text = seeing.service.dialogue().decode(out.sequences[0, -NEW:].tolist())
    assert text
    return text


def test_every_api_answers_as_transformers(seeing: Running, expected: str) -> None:
    api: Any = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)
    done = api.chat.completions.create(**chat(image(data_url(DATA))))
    assert done.choices[0].message.content == expected
    stream = api.chat.completions.create(**chat(image(data_url(DATA))), stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == expected
    content = [
        {"type": "input_image", "image_url": data_url(DATA), "detail": "auto"},
        {"type": "input_text", "text": QUESTION["text"]},
    ]
    response = api.responses.create(
        model=NAME, input=[{"role": "user", "content": content}], max_output_tokens=NEW,
        temperature=0,
    )  # fmt: skip
    assert response.output_text == expected
    messages: Any = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0).messages
    turn = {"role": "user", "content": [source(), QUESTION]}
    answer = messages.create(
        model=NAME, max_tokens=NEW, messages=[turn], extra_body={"temperature": 0}
    )
    assert answer.content[0].text == expected
    counted = messages.count_tokens(model=NAME, messages=[turn])
    assert counted.input_tokens == done.usage.prompt_tokens
    message: Any = {"role": "user", "content": QUESTION["text"], "images": [in_base64(DATA)]}
    options = {"temperature": 0, "num_predict": NEW}
    assert ollama.Client(seeing.url).chat(NAME, [message], options=options).message.content == (
        expected
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image("https://example.com/a.png"), "must have a data URL"),
        (image("file:///etc/passwd"), "must have a data URL"),
        (image("data:image/svg+xml;base64,AAAA"), "must have one of the types image/png"),
        (image("data:image/png;base64,?"), "picture 1: its data are not valid base64"),
        (image(data_url(DATA, "image/jpeg")), "picture 1: it is image/png, not image/jpeg"),
        (image(data_url(DATA[:-2000])), "picture 1: it is damaged"),
        (image(None), "must have a data URL"),
        ({"type": "video_url"}, "video_url parts are not supported"),
    ],
)
def test_bad_pictures_are_400(seeing: Running, part: Any, message: str) -> None:
    response = seeing.post(CHAT, chat(part))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "url", "url": "https://example.com/a.png"}, "fetches nothing"),
        ({"media_type": "image/bmp"}, "media_type"),
        ({"data": "?"}, "picture 1: its data are not valid base64"),
    ],
)
def test_bad_pictures_are_400_in_anthropics_api(seeing: Running, change: Any, message: str) -> None:
    turn = {"role": "user", "content": [source(**change)]}
    response = seeing.post("/v1/messages", {"model": NAME, "max_tokens": 3, "messages": [turn]})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_pictures_beyond_the_memory_for_all_requests_are_429(
    seeing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeing.service.dialogue().pictures, "waiting_bytes", 100)
    assert seeing.post(CHAT, chat(image(data_url(DATA)))).status_code == 429
    monkeypatch.undo()
    assert seeing.post(CHAT, chat(image(data_url(DATA)))).status_code == 200


def test_a_text_model_refuses_pictures_by_name() -> None:
    running = launch(fake_engine("Hi"))
    try:
        error = running.post(CHAT, chat(image(data_url(DATA)))).json()["error"]
    finally:
        running.stop()
    assert error["message"] == "image_url parts are not supported: this server takes text only"
