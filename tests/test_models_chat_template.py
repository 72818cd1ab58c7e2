"""Splitting a chat template around the user's message."""

from __future__ import annotations

from typing import Any

import pytest
from test_models_helpers import CHAT_TEMPLATE, tiny_tokenizer

from agentcompact.errors import InputError
from agentcompact.models import split_template


@pytest.fixture(scope="module")
def shared_tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def tokenizer(shared_tokenizer: Any) -> Any:
    shared_tokenizer.chat_template = CHAT_TEMPLATE
    return shared_tokenizer


@pytest.mark.parametrize("system", [None, "Answer briefly."])
def test_parts_rebuild_the_rendered_prompt(tokenizer: Any, system: str | None) -> None:
    parts = split_template(tokenizer, system=system)
    assert parts is not None
    messages = [{"role": "user", "content": "a document\n\nand a question?"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert parts.prefix + "a document" + "\n\n" + "and a question?" + parts.suffix == rendered
    assert parts.suffix.endswith("<|assistant|>\n")


def test_nothing_is_stripped(tokenizer: Any) -> None:
    tokenizer.chat_template = "  \n<{{ messages[0]['content'] }}> \n\n "
    parts = split_template(tokenizer)
    assert parts is not None
    assert (parts.prefix, parts.suffix) == ("  \n<", "> \n\n ")


def test_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert split_template(tokenizer) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | upper }}",
        "{{ messages[0]['content'] | replace('\n', ' ') }}",
        "{{ messages[0]['content'] }}{{ messages[0]['content'] }}",
        "always the same",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_template_that_changes_the_message(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert split_template(tokenizer) is None


def test_thinking_is_switched_off_where_it_can_be(tokenizer: Any) -> None:
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.chat_template = "{{ messages[0]['content'] }}|" + switch
    parts = split_template(tokenizer)
    assert parts is not None
    assert parts.suffix == "|<think></think>"


def test_template_that_refuses_a_system_message(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    assert split_template(tokenizer) is not None
    with pytest.raises(InputError, match="refuses a system message: System role not supported"):
        split_template(tokenizer, system="Be brief.")


def test_template_that_drops_a_system_message(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(InputError, match="ignores system messages"):
        split_template(tokenizer, system="Be brief.")
