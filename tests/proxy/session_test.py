"""Every token of a session is where it came from: rendered, or sampled once and trained once."""

import copy
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metagym.errors import ContextOverflowError, EngineError, InputError, TokenLimitError
from metagym.protocols import Chat
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.testing import FaultyBackend, ScriptedBackend, scripted_logprob
from metagym.types import Generation, Message, Sampling

END = 2  # <|im_end|>, the chat's end of turn and the tokenizer's EOS; 0, <|endoftext|>, also stops


@pytest.fixture(scope="module")
def renderer(model_dir):
    return Renderer.from_dir(model_dir)


def user(text):
    return Message("user", text)


def make(renderer, *replies, context=512, stop=END, **kwargs):
    """(session, backend) where the model says `replies` (texts), each ended by `stop`."""
    script = [[*renderer.encode_text(r), stop] if isinstance(r, str) else r for r in replies]
    backend = ScriptedBackend(script)
    return Session(backend, renderer, context=context, **kwargs), backend


def talk(session, *texts, prefix=""):
    """Plays an episode in which the world says `texts`; returns the whole conversation."""
    messages = []
    for text in texts:
        messages.append(user(text))
        messages.append(session.chat(messages, prefix=prefix))
    return messages


def spans(renderer, trace):
    """[(text, sampled, trainable, turn)] of maximal runs."""
    out, start = [], 0
    key = list(zip(trace.sampled, trace.trainable, trace.turn, strict=True))
    for i in range(1, len(trace) + 1):
        if i == len(trace) or key[i] != key[start]:
            text = renderer.decode(trace.tokens[start:i])
            out.append((text, *(int(x) for x in key[start])))
            start = i
    return out


def test_three_turns_dumped(renderer):
    session, backend = make(renderer, "go north", [*renderer.encode_text("east")], "west")
    assert isinstance(session, Chat)
    session.sampling = Sampling(max_tokens=len(renderer.encode_text("go north")) + 1, stop_token_ids=(0, END))
    messages = talk(session, "door", "hello", "world", prefix="Action:")
    (trace,) = session.traces
    assert spans(renderer, trace) == [
        ("<|im_start|>user\ndoor<|im_end|>\n<|im_start|>assistant\nAction:", 0, 0, 0),
        ("go north<|im_end|>", 1, 1, 0),
        ("\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nAction:", 0, 0, 1),
        ("east", 1, 1, 1),  # ended by length: the end of turn that follows is rendered
        ("<|im_end|>\n<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\nAction:", 0, 0, 2),
        ("west<|im_end|>", 1, 1, 2),
    ]
    assert [m.content for m in messages[1::2]] == ["Action:go north", "Action:east", "Action:west"]
    expected = [scripted_logprob(t) for t in trace.tokens[trace.sampled]]
    np.testing.assert_array_equal(trace.logprobs[trace.sampled], np.float32(expected))
    assert np.isnan(trace.logprobs[~trace.sampled]).all()
    assert set(trace.version[trace.sampled]) == {0}
    assert set(trace.version[~trace.sampled]) == {-1}
    for prompt, _ in backend.calls:
        assert trace.tokens[: len(prompt)].tolist() == list(prompt), "each prompt is the trace so far"
    assert trace.tokens.tolist() == renderer.render(messages, generation_prompt=False)[:-1]
    m = session.metrics
    assert (m["calls"], m["branches"], m["cut_replies"], m["unmatched"], m["not_append_only"]) == (
        3,
        1,
        1,
        0,
        0,
    )
    assert m["sampled_tokens"] == trace.sampled.sum()


def test_only_the_end_of_turn_of_the_chat_is_added(renderer):
    """A reply that stops at another stop token (<|endoftext|>) is closed by the template's, rendered."""
    session, _ = make(renderer, "go", "east", stop=0)
    talk(session, "a", "b")
    (trace,) = session.traces
    assert [s[0] for s in spans(renderer, trace)][1:3] == [
        "go<|endoftext|>",
        "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_replies_are_never_tokenised_again(renderer):
    """CASES 87: the model spells "  international" in bytes; tokenising its text would give other tokens."""
    spelled = [i for c in "  international" for i in renderer.encode_text(c)]
    assert spelled != renderer.encode_text("  international")
    session, backend = make(renderer, [*spelled, END], "ok")
    messages = talk(session, "a", "b")
    assert messages[1].content == "  international"
    assert backend.calls[1][0][len(backend.calls[0][0]) :][: len(spelled) + 1] == (*spelled, END)
    (trace,) = session.traces
    assert trace.sampled.sum() == len(spelled) + 1 + len(renderer.encode_text("ok")) + 1


@pytest.mark.parametrize("echo", ["north \n", " north", "north\r\n"])
def test_an_echo_is_matched_by_its_text(renderer, echo):
    session, _ = make(renderer, "north\n", "east")
    session.chat([user("a")])
    session.chat([user("a"), Message("assistant", echo), user("b")])
    assert len(session.traces) == 1


def test_what_extends_nothing_opens_a_branch(renderer):
    session, _ = make(renderer, "north", "east", "west", "south")
    messages = talk(session, "a", "b")
    edited = [user("A"), *messages[1:], user("c")]
    session.chat(edited)
    session.chat([*messages[:2], user("other")])  # shares the first turn only
    first, sibling, new = session.traces  # the sibling belongs to the first root
    assert [s[:3] for s in spans(renderer, first)][1::2] == [
        ("north<|im_end|>", 1, 1),
        ("east<|im_end|>", 1, 1),
    ]
    shared, own = [s[:3] for s in spans(renderer, sibling)][1::2]
    assert shared == ("north<|im_end|>", 1, 0)
    assert own == ("south<|im_end|>", 1, 1)
    assert [s[0] for s in spans(renderer, new) if s[1]] == ["west<|im_end|>"], (
        "rebuilt replies are not sampled"
    )
    assert session.metrics["unmatched"] == 1
    assert session.metrics["branches"] == 3


def test_a_repeated_request_is_a_sibling_and_shared_spans_train_once(renderer):
    session, backend = make(renderer, "go", "east", "west", "east", seed=3)
    messages = talk(session, "a", "b")
    again = session.chat(messages[:3])
    assert again.content == "west"
    assert backend.calls[1][0] == backend.calls[2][0]
    assert backend.calls[1][1].seed != backend.calls[2][1].seed
    one, two = session.traces
    shared = len(backend.calls[1][0])
    np.testing.assert_array_equal(one.tokens[:shared], two.tokens[:shared])
    assert not two.trainable[:shared].any()
    assert two.sampled[:shared].any()
    assert sum(t.trainable.sum() for t in session.traces) == session.metrics["sampled_tokens"]


def test_a_template_that_rewrites_history_branches_and_is_counted(model_dir):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('|')[-1] }}"
        "{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = Renderer.from_dir(model_dir, template)
    session, _ = make(renderer, "hm|north", "east")
    talk(session, "a", "b")
    one, two = session.traces
    assert "hm|" in renderer.decode(one.tokens)
    assert "hm|" not in renderer.decode(two.tokens)
    assert session.metrics["not_append_only"] == 1
    assert one.trainable.sum() + two.trainable.sum() == session.metrics["sampled_tokens"]


def test_the_sampling_contract_is_forced(renderer):
    """CASES 91: training samples the whole distribution at temperature 1, and tells what was asked."""
    wild = Sampling(max_tokens=9, temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(7,))
    session, backend = make(renderer, "a", sampling=wild)
    session.chat([user("a")])
    used = backend.calls[0][1]
    assert used.on_contract
    assert (used.max_tokens, used.stop_token_ids) == (9, (7, 0, END))
    assert session.forced == {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    assert session.metrics["forced"] == 4
    session, backend = make(renderer, "a", sampling=wild, training=False)
    session.chat([user("a")])
    used = backend.calls[0][1]
    assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.3, 0.9, 5, 0.1)
    assert session.forced == {}


def test_context_and_budget(renderer):
    session, backend = make(renderer, "north", "east", token_budget=4)
    length = len(renderer.render([user("a")], generation_prompt=True))
    session._context = length + 3
    session.chat([user("a")])
    assert backend.calls[0][1].max_tokens == 3, "clamped to what fits"
    with pytest.raises(ContextOverflowError, match="no room"):
        session.chat([user("a longer text that does not fit at all")])
    session._context = 512
    session._counts["sampled_tokens"] = 3
    session.chat([user("b")])
    assert backend.calls[1][1].max_tokens == 1, "clamped to the budget"
    with pytest.raises(TokenLimitError, match="budget of 4"):
        session.chat([user("c")])
    assert len(session.traces) == 2


def bad(tokens, finish, logprobs=None, version=None):
    n = len(tokens)
    return Generation(
        np.array(tokens, np.int32),
        np.full(n, -1.0, np.float32) if logprobs is None else logprobs,
        np.zeros(n, np.int32) if version is None else version,
        finish,
    )


class Returns:
    """A backend whose next answers are what it was given."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def submit(self, prompt_ids, sampling):
        from concurrent.futures import Future

        future = Future()
        answer = self.answers.pop(0)
        answer = answer() if callable(answer) else answer
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future

    def abort(self, future): ...
    def load(self, params, version): ...
    def close(self): ...


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (bad([], "length"), "no tokens"),
        (bad([9, 9], "stop"), "end-of-turn"),
        (bad([9, END], "length"), "end-of-turn"),
        (bad([END, 9, END], "stop"), "end-of-turn"),
        (bad([9] * 20, "length"), "more than"),
        (bad([-4], "length"), "counts from 0"),
        (bad([9], "abort"), "aborted"),
        ({"tokens": [1]}, "not a Generation"),
        (None, "not a Generation"),
        (ValueError("lengths differ"), "lengths differ"),
        (OSError("connection reset"), "connection reset"),
    ],
)
def test_an_unusable_answer_is_an_engine_error(renderer, answer, reason):
    """CASES 86: what has no tokens, or not all of them, is never trained."""
    good = bad([9, END], "stop")
    session = Session(Returns(good, answer, good), renderer, sampling=Sampling(max_tokens=10))
    first = session.chat([user("a")])
    before = session.traces
    request = [user("a"), first, user("b")]
    with pytest.raises(EngineError, match=reason):
        session.chat(request)
    np.testing.assert_array_equal(session.traces[0].tokens, before[0].tokens)
    assert session.metrics["errors"] == 1
    session.chat(request)
    assert len(session.traces) == 1, "the failed attempt left nothing behind"


@pytest.mark.parametrize("fault", ["error", "nan", "missing", "short", "abort", "hang"])
def test_faults_of_the_backend(renderer, fault):
    good = ScriptedBackend([[9, 9, END]] * 9)
    session = Session(FaultyBackend(good, fault, at=1), renderer, timeout_s=0.05)
    messages = [user("a")]
    messages += [session.chat(messages), user("b")]
    with pytest.raises(EngineError):
        session.chat(messages)
    messages.append(session.chat(messages))
    (trace,) = session.traces
    assert trace.turn.tolist() == sorted(trace.turn.tolist())
    assert set(trace.turn) == {0, 2}
    assert trace.sampled.sum() == 6


def test_close_ends_what_runs(renderer):
    backend = FaultyBackend(ScriptedBackend([[9, END]] * 9), "hang", at=1)
    session = Session(backend, renderer)
    session.chat([user("a")])
    caught = []

    def wait():
        try:
            session.chat([user("b")])
        except EngineError as e:
            caught.append(str(e))

    thread = threading.Thread(target=wait)
    thread.start()
    while not session._running:
        thread.join(0.001)
    session.close()
    session.close()
    thread.join(10)
    assert caught == ["the session was closed while it waited for a reply"]
    with pytest.raises(InputError, match="closed"):
        session.chat([user("c")])
    assert len(session.traces) == 1
    assert copy.deepcopy(session) is session


def test_bad_requests_are_input_errors(renderer):
    session, _ = make(renderer)
    with pytest.raises(InputError, match="at least one message"):
        session.chat([])
    assert session.traces == ()


def test_seeds_depend_on_session_and_turn_only(renderer):
    def seeds(seed):
        session, backend = make(renderer, "a", "b", "c", seed=seed)
        talk(session, "x", "y", "z")
        return [sampling.seed for _, sampling in backend.calls]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6
    session, backend = make(renderer, "a", sampling=Sampling(seed=5))
    session.chat([user("x")])
    assert backend.calls[0][1].seed == 5


def test_many_threads(renderer):
    session = Session(ScriptedBackend(lambda prompt: [sum(prompt) % 200 + 20, END]), renderer, seed=0)

    def run(n):
        talk(session, f"door {n}", "east", "west")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    traces = session.traces
    assert len(traces) == 16
    assert all(t.sampled.sum() == 6 and t.trainable.sum() == 6 for t in traces)
    assert sorted(x for t in traces for x in set(t.turn.tolist())) == list(range(48))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["a", "b", " c\n"]), st.sampled_from(["", "Th"])),
        max_size=8,
    )
)
def test_any_edits_keep_prompt_and_trace_equal(renderer, moves):
    """Random dialogues with drops, retries and edits: the tokens before every sampled span are what the
    engine was given, and every sampled span is trained once."""
    backend = ScriptedBackend(
        lambda prompt: [*(20 + (prompt[-1] * 7 + i) % 300 for i in range(len(prompt) % 3)), END]
    )
    session = Session(backend, renderer, seed=1, context=4096)
    history: list[list[Message]] = [[]]
    for back, text, prefix in moves:
        base = history[back % len(history)]
        request = [*base, user(text)] if back < 5 else [*base[:-2], user(text)]
        history.append([*request, session.chat(request, prefix=prefix)])
    given_prompts = [list(p) for p, _ in backend.calls]
    trained = np.zeros(len(moves), int)
    for trace in session.traces:
        for turn in set(trace.turn[trace.sampled].tolist()):
            start = int(np.flatnonzero((trace.turn == turn) & trace.sampled)[0])
            assert trace.tokens[:start].tolist() == given_prompts[turn]
            trained[turn] += trace.trainable[start]
    assert (trained == 1).all()


def test_what_stands_around_a_reply_is_rendered(renderer):
    """A session's prefix and suffix make a whole text of one sampled token; only that trains."""
    go = renderer.encode_text("go")[:1]
    session, backend = make(renderer, go, go, "stop", prefix="<b>", suffix="</b>", sampling=Sampling(1))
    said = renderer.decode(go)
    messages = talk(session, "one", "two")
    assert [m.content for m in messages[1::2]] == [f"<b>{said}</b>"] * 2
    (trace,) = session.traces
    assert trace.tokens[trace.sampled].tolist() == go * 2
    assert (trace.trainable == trace.sampled).all()
    for prompt, _ in backend.calls:
        assert trace.tokens[: len(prompt)].tolist() == list(prompt)
    text = renderer.decode(trace.tokens)
    assert text.count(f"<b>{said}</b><|im_end|>\n<|im_start|>user\ntwo") == 1, "the model sees it whole"
    assert text.endswith(f"<b>{said}")
    reply = session.reply_of(session.nodes[0])
    assert (reply.finish, reply.completion_tokens) == ("stop", 1)


def test_the_engine_s_fault_is_told_until_a_call_is_answered(renderer):
    backend = FaultyBackend(ScriptedBackend([[*renderer.encode_text("a"), END]] * 3), "error", at=1)
    session = Session(backend, renderer, context=512)
    session.chat([user("a")])
    assert session.broken is None
    with pytest.raises(EngineError):
        session.chat([user("b")])
    assert isinstance(session.broken, EngineError)
    session.chat([user("b")])
    assert session.broken is None
    with pytest.raises(ContextOverflowError):
        session.chat([user("x" * 2000)])
    assert session.broken is None, "that one is the program's"
