import json

import pytest

from quantkit.runtime.text import ChatText
from quantkit.server.api_errors import ApiError
from quantkit.server.params import Limits, fit, sampling_params
from quantkit.server.prompts import chat_messages, completion_prompts
from quantkit.server.requests import ChatRequest, CompletionRequest, parse
from tests.tiny import write_tokenizer

LIMITS = Limits(max_model_len=100, vocab_size=352)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder, "qwen2")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20}')
    return ChatText(folder)


def chat(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode()


def refused(call):
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b"[]", None, "Expected `object`"),
        (b'{"messages": NaN}', None, "not valid JSON"),
        (b'{"messages": "\\ud800"}', None, "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None, "not valid JSON"),
        (b'{"prediction": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"temperature": 1}', "messages", "missing field"),
        (chat(temprature=1), "temprature", "did you mean 'temperature'"),
        (chat(temperature="hot"), "temperature", "Expected `float"),
        (chat(max_tokens=1.5), "max_tokens", "Expected `int"),
        (chat(max_tokens=True), "max_tokens", "Expected `int"),
        (chat(tools=[{"type": "function"}]), "tools", "not supported"),
        (chat(response_format={"type": "json_object"}), "response_format", "not supported"),
        (chat(reasoning_effort="high"), "reasoning_effort", "not supported"),
        (chat(store=True), "store", "not supported"),
    ],
)
def test_a_bad_body_is_refused_by_name(body, param, words):
    error = refused(lambda: parse(body, ChatRequest))
    assert error.param == param
    assert words in error.message


def test_neutral_values_of_unsupported_fields_pass():
    parse(chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=False, user="me"), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"352": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(text, fields, param):
    assert refused(lambda: sampling_params(parse(chat(**fields), ChatRequest), text, LIMITS)).param == param


def test_a_silent_request_gets_the_models_own_sampling(text):
    params = sampling_params(parse(chat(top_k=-1), ChatRequest), text, LIMITS)
    assert (params.temperature, params.top_k) == (0.7, 0)


def test_a_prompt_too_long_is_refused_with_both_numbers(text):
    params = sampling_params(parse(chat(), ChatRequest), text, LIMITS)
    message = refused(lambda: fit(params, 100, LIMITS, chat=True)).message
    assert "100 tokens" in message
    assert "limit of 100" in message


def test_a_huge_max_tokens_is_refused_with_the_numbers(text):
    params = sampling_params(parse(chat(max_tokens=10**30), ChatRequest), text, LIMITS)
    message = refused(lambda: fit(params, 7, LIMITS, chat=True)).message
    assert f"{10**30}" in message
    assert "7 tokens" in message


def test_an_answer_without_max_tokens_may_fill_what_the_prompt_leaves(text):
    params = sampling_params(parse(chat(), ChatRequest), text, LIMITS)
    assert fit(params, 40, LIMITS, chat=True) == 60
    assert fit(params, 40, LIMITS, chat=False) == 16


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages):
    refused(lambda: chat_messages(parse(chat(messages=messages), ChatRequest).messages))


def test_text_parts_are_joined_and_developer_becomes_system():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    plain = chat_messages(parse(chat(messages=messages), ChatRequest).messages)
    assert plain == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_shapes(prompt, parts):
    body = json.dumps({"prompt": prompt}).encode()
    assert completion_prompts(parse(body, CompletionRequest), LIMITS) == parts


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", 1], [[1], "a"], [[]], [352], [[-1]]])
def test_prompts_that_are_none_are_refused(prompt):
    body = json.dumps({"prompt": prompt}).encode()
    assert refused(lambda: completion_prompts(parse(body, CompletionRequest), LIMITS)).param == "prompt"
