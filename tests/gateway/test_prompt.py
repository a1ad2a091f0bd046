"""Messages to token ids: the sandboxed template, the tokenizer, and the cache of languages."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from services.gateway.prompt.language import THREAD_FROM_CHARS, Language, PromptTooLong
from services.gateway.prompt.languages import Languages
from services.gateway.prompt.template import ChatTemplate, TemplateFailed
from services.protocol.events import ModelCard, SpecialTokens, TokenizerBundle
from tests.gateway.fake_engines import END, START, bundle, card

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def render(source: str, messages: list[dict] = USER, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


def test_template_gets_messages_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert render(source, bos_token="<s>") == "<s>user: Hi\n>"


def test_template_helpers() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"


def test_a_template_that_raises_says_why() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFailed, match="failed"):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception.__globals__ }}",
        "{% for x in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(attack: str) -> None:
    messages = list(USER)
    try:
        text = render(attack, messages)
    except TemplateFailed:
        text = ""
    assert "class" not in text
    assert "globals" not in text
    assert messages == USER


@pytest.mark.parametrize(("source", "why"), [("", "no chat template"), ("{% if %}", "broken")])
async def test_a_model_without_a_usable_template_is_read_and_refuses_chats(
    source: str, why: str, threads: ThreadPoolExecutor
) -> None:
    language = Language(bundle(source), threads)
    with pytest.raises(TemplateFailed, match=why):
        await language.prompt(USER, 100)


async def test_rendered_text_is_encoded_as_a_whole(threads: ThreadPoolExecutor) -> None:
    language = Language(bundle(), threads)
    ids = (await language.prompt([{"role": "user", "content": "a<|im_end|>é"}], 1000)).ids
    assert ids == [START, *b"user\na", END, *"é".encode(), END, *b"\n", START, *b"assistant\n"]


@pytest.mark.parametrize("text", ["hi", "<s>hi"])
async def test_bos_goes_in_front_once(text: str, threads: ThreadPoolExecutor) -> None:
    plain = bundle("{{ messages[0].content }}")
    spec = msgspec.json.decode(plain.tokenizer_json)
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 258, "content": "<s>"})
    language = Language(
        msgspec.structs.replace(
            plain, tokenizer_json=msgspec.json.encode(spec).decode(), special=SpecialTokens(bos_id=258, add_bos=True)
        ),
        threads,
    )
    assert (await language.prompt([{"role": "user", "content": text}], 100)).ids == [258, *b"hi"]


@pytest.mark.parametrize("length", [100, THREAD_FROM_CHARS + 500])
async def test_the_limit_is_exact_on_the_loop_and_in_a_thread(length: int, threads: ThreadPoolExecutor) -> None:
    language = Language(bundle("{{ messages[0].content }}"), threads)
    messages = [{"role": "user", "content": "x" * length}]
    assert len((await language.prompt(messages, length + 1)).ids) == length
    for _ in range(2):
        with pytest.raises(PromptTooLong) as caught:
            await language.prompt(messages, length)
        assert (caught.value.tokens, caught.value.limit) == (length, length)
    # A refusal that is remembered does not stand in the way of a larger context.
    assert len((await language.prompt(messages, length + 1)).ids) == length


async def test_a_repeated_overflow_is_not_tokenized_again(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    language = Language(bundle("{{ messages[0].content }}"), threads)
    messages = [{"role": "user", "content": "some words " * 1000}]
    for _ in range(2):
        with pytest.raises(PromptTooLong, match="11000 tokens > 4096 maximum"):
            await language.prompt(messages, 4096)
        monkeypatch.delattr(Language, "encode", raising=False)


async def test_a_long_prompt_does_not_stop_the_event_loop(threads: ThreadPoolExecutor) -> None:
    language = Language(bundle("{{ messages[0].content }}"), threads)
    pending = asyncio.create_task(language.prompt([{"role": "user", "content": "some words " * 50_000}], 10**9))
    ticks = 0
    while not pending.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 50
    assert len(pending.result().ids) == 550_000


async def test_a_language_is_fetched_once_for_many_requests() -> None:
    fetched: list[str] = []
    release = asyncio.Event()

    async def fetch(model: ModelCard) -> TokenizerBundle:
        fetched.append(model.name)
        await release.wait()
        return bundle()

    languages = Languages(fetch)
    first = asyncio.create_task(languages.of(card()))
    others = [asyncio.create_task(languages.of(card(name))) for name in ("a", "b")]
    await asyncio.sleep(0)
    first.cancel()  # its client left; the load goes on for the others
    release.set()
    one, two = await asyncio.gather(*others)
    assert one is two is await languages.of(card())
    assert len(fetched) == 1
    languages.close()


async def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    bundles = [msgspec.structs.replace(bundle(), tokenizer_json="no json"), bundle()]

    async def fetch(_: ModelCard) -> TokenizerBundle:
        return bundles.pop(0)

    languages = Languages(fetch)
    with pytest.raises(ValueError, match="tokenizer cannot be read"):
        await languages.of(card())
    assert isinstance(await languages.of(card()), Language)
    languages.close()
