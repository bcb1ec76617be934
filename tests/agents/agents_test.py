import json

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagym.agents import json_action, plain, react
from metagym.agents.json_action import parse as parse_json
from metagym.agents.plain import parse as parse_plain
from metagym.agents.react import parse as parse_react
from metagym.episode import run
from metagym.errors import FormatError
from metagym.testing import ScriptedChat

# Any text, and text made of what the parsers look at.
TEXT = st.text() | st.lists(
    st.sampled_from(
        ['{"action":', "{", "}", '"', "\\", "\n", "Action:", "action", "`", " ", "north", "[", "\ud800"]
    )
).map("".join)


@given(TEXT)
def test_parsing_gives_an_action_or_a_format_error_with_feedback(reply):
    for parse in (parse_plain, parse_react, parse_json):
        feedback = None
        try:
            action = parse(reply)
        except FormatError as error:
            feedback = str(error)
            action = None
        assert (action is None and feedback) or (action and action.strip() == action)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("north", "north"),
        ("\n\n  go north \nbecause", "go north"),
        ('"north"', "north"),
        ("`look`", "look"),
        ('**"look"**', "look"),
        ("```sh\nls -l\n```", "ls -l"),
        ('grep "a b"', 'grep "a b"'),
        ('"a" and "b"', '"a" and "b"'),
    ],
)
def test_plain(reply, action):
    assert parse_plain(reply) == action


@pytest.mark.parametrize("reply", ["", " \n\t", '""', "```\n```"])
def test_plain_without_an_action(reply):
    with pytest.raises(FormatError, match="no action"):
        parse_plain(reply)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: it is north.\nAction: go north", "go north"),
        ("Action: wait", "wait"),
        ("thought\nACTION:wait", "wait"),
        ("**Action:** `open door`", "open door"),
        ("Action: first\nThought: no.\nAction: second\nObservation: made up", "second"),
        ("The Action: here is in the middle\nAction: go", "go"),
        ("Action:\n\n  east  \n", "east"),
        ("> Action: e", "e"),
        ("- action : e", "e"),
    ],
)
def test_react(reply, action):
    assert parse_react(reply) == action


def test_react_says_what_is_wrong():
    with pytest.raises(FormatError, match='no line that begins with "Action:"'):
        parse_react("I go north. Reaction: none")
    with pytest.raises(FormatError, match='nothing after "Action:"'):
        parse_react("Action: \n ")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ('{"action": "north"}', "north"),
        ('{"action": "north"} and more {"action": "south"}', "north"),
        ('```json\n{"thought": "a {brace}", "action": " go "}\n```', "go"),
        ('{not json} {"action": "x"}', "x"),
        ('{"other": 1} {"action": "x"}', "x"),
        ('{"other": {"action": "inner"}, "action": "outer"}', "outer"),
        ('{"action": 3}', "3"),
        ('{"action": true}', "true"),
        ('{"action": "\\u00e9\\ud800"}', "é?"),
        ('{"a":' * 5 + '{"action": "x"}', "x"),
    ],
)
def test_json(reply, action):
    assert parse_json(reply) == action


@pytest.mark.parametrize(
    ("reply", "feedback"),
    [
        ("", "not a complete JSON object"),
        ('{"action": "nor', "not a complete JSON object"),
        ("{'action': 'x'}", "not a complete JSON object"),
        ("{" * 100_000, "not a complete JSON object"),
        ('{"a":' * 100_000, "not a complete JSON object"),
        ('{"a": ["' + "[" * 100_000 + "]}", "not a complete JSON object"),
        ('{"act": "x"}', 'no text under "action"'),
        ('{"action": ""}', 'no text under "action"'),
        ('{"action": null}', 'no text under "action"'),
        ('{"action": {"name": "x"}}', 'no text under "action"'),
        ('{"other": {"action": "inner"}}', 'no text under "action"'),
    ],
)
def test_json_says_what_is_wrong(reply, feedback):
    with pytest.raises(FormatError, match=feedback) as caught:
        parse_json(reply)
    assert '{"action": "one action"}' in str(caught.value)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(), st.text(min_size=1))
def test_json_reads_back_what_was_written(action, after, key):
    written = json.dumps({key: action})
    if action.strip():
        assert parse_json(written + after, key) == action.strip()


def test_the_begun_reply_counts_for_json_and_is_left_out_of_plain_actions():
    assert json_action(prefix='{"action": "').parse('{"action": "north"}') == "north"
    assert json_action(key="cmd").parse('{"cmd": "ls"}') == "ls"
    assert plain(prefix="Action:").parse("Action: north") == "north"
    assert react(prefix="Thought:").parse("Thought: hm\nAction: north") == "north"


@pytest.mark.parametrize("make", [plain, react, json_action])
def test_the_goal_and_the_format_stand_in_the_first_message_only(make):
    agent = make("Find the door.", system="S", list_actions=True)
    info = {"admissible": ["a", "b"]}
    first, later = agent.prompt("You see.", info, 0), agent.prompt("You see.", info, 1)
    assert first.startswith("Find the door.\n\nYou see.\n\nPossible actions: a, b\n\n")
    assert later == "You see.\n\nPossible actions: a, b"
    assert "Reply" in first
    assert agent.system == "S"
    alone = make("Find the door.", history=False, max_format_errors=1)
    assert alone.prompt("You see.", {}, 5).startswith("Find the door.\n\nYou see.\n\n")
    assert (alone.history, alone.max_format_errors) == (False, 1)
    assert make(format="").prompt("You see.", {}, 0) == "You see."


@pytest.mark.parametrize(
    ("agent", "reply"),
    [
        (plain("Choose."), "open red door"),
        (react("Choose."), "Thought: red it is.\nAction: open red door"),
        (json_action("Choose.", prefix='{"action": "'), 'open red door"}'),
    ],
)
def test_each_wins_an_episode(agent, reply):
    env = gym.make("metagym:metagym/Toy-v0")
    trajectory = run(env, ScriptedChat([reply] * 3), "doors-red:5", seed=0, agent=agent)
    assert trajectory.outcome == 1.0
    assert {t.action for t in trajectory.turns} == {"open red door"}
    assert trajectory.turns[0].reply == agent.prefix + reply


def test_feedback_reaches_the_model():
    chat = ScriptedChat(["no idea", "Action: red"])
    env = gym.make("metagym:metagym/Toy-v0", rounds=1)
    trajectory = run(env, chat, "doors-red:5", seed=0, agent=react())
    assert chat.calls[1][-1].content.startswith("Your reply had no line")
    assert (len(trajectory.turns), trajectory.outcome) == (2, 1.0)
