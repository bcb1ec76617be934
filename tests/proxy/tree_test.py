"""The trace tree: whatever a program does to a conversation, its tokens are those the engine was given."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metagym.proxy.render import Renderer
from metagym.proxy.session import Request, Session
from metagym.proxy.tree import canonical_text, key
from metagym.testing import ScriptedBackend
from metagym.types import Message, Sampling, Why

from .conftest import BASH, KEEPS_THOUGHTS, QWEN3_LIKE, hermes

END = 2


def user(text):
    return Message("user", text)


def ask(session, messages, deliver=True, tools=(BASH,), **more):
    """One request, as the server does it."""
    plan = session.plan(Request(tuple(messages), tools=tuple(tools), **more))
    if plan.twin is not None:
        reply = session.reply_of(plan.twin)
    else:
        call = session.submit(plan)
        reply = session.record(call, call.future.result(5))
    if deliver:
        session.delivered(reply)
    return reply.message


def ask_at_once(session, *asked):
    """Requests that run at the same time, answered the last one first. Returns the replies."""
    plans = [session.plan(Request(tuple(m), tools=tuple(t), agent=a)) for m, a, t in asked]
    calls = [None if plan.twin is not None else session.submit(plan) for plan in plans]
    replies = []
    for plan, call in list(zip(plans, calls, strict=True))[::-1]:
        twin = call is None
        replies.append(session.reply_of(plan.twin) if twin else session.record(call, call.future.result(5)))
        session.delivered(replies[-1])
    return [r.message for r in replies[::-1]]


def make(model_dir: Path, *replies, template: str | None = QWEN3_LIKE, **more):
    renderer = Renderer.from_dir(model_dir, template)
    backend = ScriptedBackend([[*renderer.encode_text(r), END] for r in replies])
    return Session(backend, renderer, context=4096, retries=True, **more), backend, renderer


def result(call, text):
    return Message("tool", text, tool_call_id=call["id"])


def js(message):
    """An echo as programs send it: other keys first, no blanks, 1.0 for 1, thoughts and text trimmed."""
    calls = []
    for c in message.tool_calls:
        arguments = dict(reversed(json.loads(c["function"]["arguments"]).items()))
        arguments = json.dumps(arguments, separators=(",", ":"))
        calls.append({**c, "function": {"arguments": arguments, "name": c["function"]["name"]}})
    return dataclasses.replace(
        message, content=message.content.strip(), tool_calls=tuple(calls), reasoning=None
    )


def whys(trace):
    return [Why(k).name for k, _ in itertools.groupby(trace.why.tolist())]


def test_an_episode_with_tool_calls_is_one_trace(model_dir):
    session, backend, renderer = make(
        model_dir,
        "<think>\nlook\n</think>\n\nI look. \n"
        + hermes(command="ls", n=1)
        + "\n"
        + hermes(command="pwd", n=2.0),
        "done",
        template=KEEPS_THOUGHTS,
    )
    talk = [Message("system", "You fix."), user("fix it")]
    first = ask(session, talk)
    assert (first.content, first.reasoning, len(first.tool_calls)) == ("I look.", "look", 2)
    a, b = first.tool_calls
    assert json.loads(b["function"]["arguments"]) == {"command": "pwd", "n": 2.0}
    talk += [js(first), result(a, "x <|im_end|>"), result(b, "/")]
    ask(session, talk)
    (trace,) = session.traces
    for prompt, _ in backend.calls:
        assert trace.tokens[: len(prompt)].tolist() == list(prompt)
    said = renderer.decode(trace.tokens[trace.trainable])
    assert said.count("<|im_end|>") == 2
    assert renderer.decode(trace.tokens).endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nx <|im_end|>\n</tool_response>\n"
        "<tool_response>\n/\n</tool_response><|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
    )
    assert (trace.tokens == END).sum() == 5, "the tool's text is no end of turn"
    assert whys(trace) == ["RENDERED", "SAMPLED"] * 2
    assert trace.kind == "main"
    assert session.metrics["tool_calls"] == 2


def test_what_the_template_drops_branches_or_is_kept(model_dir):
    """CASES 97: thoughts of earlier turns are dropped by the template; which policy applies is declared."""
    replies = ("<think>\nhm\n</think>\n\n1", "<think>\nmhm\n</think>\n\n2", "3")
    for history, branches in (("branch", 3), ("keep", 1)):
        session, backend, renderer = make(model_dir, *replies, history=history)
        talk = []
        for text in "abc":
            talk.append(user(text))
            talk.append(ask(session, talk, tools=()))
        traces = session.traces
        assert len(traces) == branches
        assert session.metrics["not_append_only"] == branches - 1
        trained = sum(int(t.trainable.sum()) for t in traces)
        assert trained == session.metrics["sampled_tokens"]
        last = renderer.decode(traces[-1].tokens)
        assert last.count("hm") == (2 if history == "keep" else 0)
        assert len(backend.calls[-1][0]) < len(traces[-1])
        if history == "branch":
            assert whys(traces[-1]) == ["RENDERED", "REBUILT", "RENDERED", "REBUILT", "RENDERED", "SAMPLED"]
            rebuilt = renderer.decode(traces[-1].tokens[traces[-1].why == Why.REBUILT])
            assert rebuilt == "1<|im_end|>2<|im_end|>"


def test_no_thinking_is_append_only(model_dir):
    """CASES 98: a template that puts an empty block of thoughts into the last turn only."""
    tokenizer, special = (model_dir / "tokenizer.json").read_text(), {"enable_thinking": False}
    renderer = Renderer(tokenizer, QWEN3_LIKE, special=special, eos=[END])
    backend = ScriptedBackend(lambda prompt: [*renderer.encode_text("yes"), END])
    session = Session(backend, renderer, history="keep")
    talk = [user("a")]
    talk += [session.chat(talk), user("b")]
    session.chat(talk)
    (trace,) = session.traces
    assert trace.tokens[: len(backend.calls[1][0])].tolist() == list(backend.calls[1][0])
    assert renderer.decode(trace.tokens).count("<think>\n\n</think>\n\nyes<|im_end|>") == 2


def test_calls_that_history_forgets_keep_their_tokens(model_dir):
    """CASES 99: the ids that were sampled are those that come before the second turn."""
    session, backend, _ = make(model_dir, hermes(command="ls"), "done")
    talk = [user("go")]
    reply = ask(session, talk)
    ask(session, [*talk, js(reply), result(reply.tool_calls[0], "")])
    sampled = session.nodes[0].generation.tokens.tolist()
    first, second = (list(p) for p, _ in backend.calls)
    assert second[: len(first) + len(sampled)] == first + sampled


def test_an_edited_call_is_another_message(model_dir):
    session, _, _ = make(model_dir, hermes(command="ls"), "a", "b")
    talk = [user("go")]
    reply = ask(session, talk)
    call = reply.tool_calls[0]
    other = {**call, "function": {**call["function"], "arguments": '{"command": "rm"}'}}
    ask(session, [*talk, dataclasses.replace(reply, tool_calls=(other,)), result(call, "")])
    ask(session, [*talk, dataclasses.replace(reply, tool_calls=({**call, "id": "x"},)), result(call, "")])
    assert [len(n.messages) for n in session.nodes] == [2, 4, 4]
    assert session.metrics["unmatched"] == 2


def test_kinds_of_branches(model_dir):
    """A title first, the main conversation, a sub-agent, a summary that becomes the history."""
    summary = "The agent looked at the file and found a minus."
    session, _, _ = make(
        model_dir,
        "Title",
        hermes(command="ls"),
        "sub",
        summary,
        "done",
        "again",
        train=("main", "compaction"),
    )
    ask(session, [user("Write a title")], tools=())
    talk = [Message("system", "S"), user("go")]
    talk.append(ask(session, talk))
    ask(session, [Message("system", "S"), user("sub task")], agent="agent-2")
    ask(session, [*talk, result(talk[-1].tool_calls[0], "x"), user("Summarise.")], tools=())
    ask(session, [Message("system", "S"), user(f"So far: {summary}")])
    traces = session.traces
    assert [t.kind for t in traces] == ["side", "main", "sub-agent", "compaction", "main"]
    assert [bool(t.trainable.any()) for t in traces] == [False, True, False, True, True]
    assert [whys(t)[-1] for t in traces] == ["EXCLUDED", "SAMPLED", "EXCLUDED", "SAMPLED", "SAMPLED"]
    assert session.nodes[1].parent is not session.nodes[3].parent


SCRATCH = "<scratchpad>\nI look back at all of it.\n</scratchpad>\n"
STATE = "<state>\nThe file calc.py has a minus where a plus belongs.\n\nNothing was changed so far.\n</state>"


@pytest.mark.parametrize(
    ("first", "said", "told", "kind"),
    [
        (False, STATE, f"Go on from this:\n{STATE}\nThanks.", "compaction"),
        (False, SCRATCH + STATE, STATE, "compaction"),  # without what is not meant to be kept
        (False, SCRATCH * 9 + STATE * 3, STATE * 3, "compaction"),  # which may be most of it
        (False, STATE, " ".join(STATE[7:-8].split()), "compaction"),  # in one line, without the tags
        (False, "Repair of calc.py", STATE, "side"),  # a title late in the episode
        (False, "ok", "ok, go on", "side"),  # so little can stand anywhere
        (
            True,
            "Mend the sign in it",
            "Mend the sign in it, please.",
            "side",
        ),  # a title: the task in its words
    ],
)
def test_a_summary_is_known_by_what_goes_on_from_it(model_dir, first, said, told, kind):
    replies = [said, "a", "b"] if first else ["a", said, "b"]
    session, _, _ = make(model_dir, *replies, sampling=Sampling(max_tokens=2000))
    asked = [([user("Summarise.")], ()), ([user("Fix it.")], (BASH,))]
    for talk, tools in asked if first else asked[::-1]:
        ask(session, talk, tools=tools)
    ask(session, [user(told)])
    assert sorted(t.kind for t in session.traces) == sorted(["main", "main", kind])


def test_a_program_without_tools_is_the_main_one(model_dir):
    session, _, _ = make(model_dir, "a", "b")
    ask(session, [user("x")], tools=())
    ask(session, [user("y")], tools=())
    assert [t.kind for t in session.traces] == ["main", "main"]


def test_retries(model_dir):
    """An undelivered answer is given again; one that is asked for again and then left is superseded."""
    session, backend, _ = make(model_dir, "lost", "again", "on")
    first = ask(session, [user("a")], deliver=False)
    assert [whys(t)[-1] for t in session.traces] == ["SUPERSEDED"], "nobody has it"
    assert ask(session, [user("a")]) is first
    assert len(backend.calls) == 1
    assert [whys(t)[-1] for t in session.traces] == ["SAMPLED"]
    second = ask(session, [user("a")])
    assert second.content == "again"
    assert [whys(t)[-1] for t in session.traces] == ["SUPERSEDED", "SAMPLED"]
    ask(session, [user("a"), first, user("b")])
    assert [whys(t)[-1] for t in session.traces] == ["SAMPLED", "SAMPLED"], "both are used"
    assert session.metrics["superseded"] == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ('{"a": 1, "b": [1.0, "é"]}', '{"b":[1,"\\u00e9"],"a":1.0}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ("not json ", "not json"),
        ('{"a": 1e3}', '{"a":1000}'),
    ],
)
def test_canonical_json(a, b):
    assert canonical_text(a) == canonical_text(b)


@pytest.mark.parametrize(("a", "b"), [('{"a": 1}', '{"a": "1"}'), ('{"a": true}', '{"a": 1}'), ("{}", "[]")])
def test_canonical_json_tells_values_apart(a, b):
    assert canonical_text(a) != canonical_text(b)


def test_keys_of_messages():
    one = Message("assistant", "cafe\u0301\r\n ")
    assert key([one]) == key([Message("assistant", "café")])
    assert key([user("a ")]) != key([user("a")])
    assert key([Message("tool", "x", tool_call_id="1")]) != key([Message("tool", "x", tool_call_id="2")])


REPLIES = (
    "ok",
    " spaced\n",
    "<think>\nhm\n</think>\n\nso",
    hermes(command="ls"),
    "I run.\n" + hermes(command="a") + "\n" + hermes(command="b"),
    "<tool_call>\n{broken\n</tool_call>",
    "",
)
MOVES = st.tuples(
    st.sampled_from(
        ["go on", "edit", "drop", "compact", "sub-agent", "parallel", "retry", "lost", "side", "fork"]
    ),
    st.integers(0, 6),
    st.sampled_from(["", "a", "<|im_end|>", "so\n"]),
)


@pytest.mark.parametrize("history", ["branch", "keep"])
@pytest.mark.parametrize("template", [None, QWEN3_LIKE, KEEPS_THOUGHTS])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(MOVES, max_size=12), seed=st.integers(0, 99))
def test_whatever_happens_the_tokens_are_what_the_engine_was_given(model_dir, template, history, moves, seed):
    renderer = Renderer.from_dir(model_dir, template)
    rng = np.random.default_rng(seed)
    backend = ScriptedBackend(
        lambda prompt: [*renderer.encode_text(REPLIES[int(rng.integers(len(REPLIES)))]), END]
    )
    session = Session(backend, renderer, context=8192, seed=seed, retries=True, history=history)
    talks = [([user("go")], "", (BASH,))]
    last = talks[0]
    for move, which, text in moves:
        messages, agent, tools = talks[which % len(talks)]
        if move == "edit":
            messages = [user(f"{text}!"), *messages[1:]]
        elif move == "drop":
            messages = messages[:1] + messages[-(which % 3) :] if which % 3 else messages[:1]
        elif move == "compact":
            messages = [user(f"So far: {text}"), Message("assistant", "I see."), user("Go on.")]
        elif move == "sub-agent":
            messages, agent = [user(f"sub {text}")], f"agent {which}"
        elif move == "side":
            messages, tools = [*messages, user("Summarise.")], ()
        if move == "retry":
            messages, agent, tools = last
        elif messages[-1].role == "assistant":
            results = [result(c, text) for c in messages[-1].tool_calls]
            messages = [*messages[:-1], js(messages[-1]), *results, *([] if results else [user(f"{text}?")])]
        last = (messages, agent, tools)
        if move == "parallel":  # with a sub-agent and another that goes on from the same
            others = (
                ([user(f"sub {text}")], f"agent {which}", tools),
                ([*messages, user(f"{text}.")], agent, tools),
            )
            found = ask_at_once(session, last, *others)
            talks += [([*m, r], a, t) for (m, a, t), r in zip((last, *others), found, strict=True)]
            continue
        reply = ask(session, messages, deliver=move != "lost", agent=agent, tools=tools)
        if move != "lost":
            talks.append(([*messages, reply], agent, tools))

    nodes, given_prompts = session.nodes, [list(p) for p, _ in backend.calls]
    assert len(nodes) == len(given_prompts)
    trained = np.zeros(len(nodes), int)
    for trace in session.traces:
        for turn in set(trace.turn[trace.sampled].tolist()):
            span = np.flatnonzero((trace.turn == turn) & trace.sampled)
            assert span.tolist() == list(range(span[0], span[-1] + 1))
            assert trace.tokens[: span[0]].tolist() == given_prompts[turn]
            assert len(set(trace.trainable[span].tolist())) == 1
            trained[turn] += int(trace.trainable[span[0]])
        assert ((trace.why == Why.SAMPLED) == trace.trainable).all()
        assert (trace.sampled | np.isin(trace.why, [Why.RENDERED, Why.REBUILT])).all()
    assert trained.max(initial=0) <= 1
    superseded = [session._tree.superseded(n) for n in sorted(nodes, key=lambda n: n.turn)]
    assert (trained == 1).tolist() == [not s for s in superseded], "each reply that was used trains once"
    if history == "keep":
        assert session.metrics["not_append_only"] == 0
