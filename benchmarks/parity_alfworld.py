"""Differential test of the native ALFWorld interpreter against TextWorld: every character, command and win.

usage: python benchmarks/parity_alfworld.py [--data DIR] [--train-per-type 300] [--generated 10] [--exact]

Plays each game in both, in step: the walkthrough with wrong, near-miss and malformed commands in between,
errands that chance would rarely run (slicing, treating things in turn, shifting them about), then random
commands. After the reset and after each step it compares the observation, the list of
admissible commands and whether the game is won. Ends with exit code 1 at a difference.

Needs the extra `alfworld` (see docs/worlds.md). `--exact` runs TextWorld as it is; without it, results of its
pure functions are remembered (`metagym.envs.alfworld.real.memoise`), which is 5 to 10 times faster. `--log`
records finished games with their commands and a digest of what TextWorld answered: an interrupted run goes on
where it was, and `--replay` compares the native interpreter with such a log, without TextWorld, in seconds.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metagym.envs import worker
from metagym.envs.alfworld import game as games
from metagym.envs.alfworld.native import Play
from metagym.errors import WorldError
from metagym.testing import BAD_ACTIONS

RECYCLE = 40  # games a worker process plays before it is replaced: TextWorld leaks


def near_misses(commands: list[str], game: games.Game, rng: random.Random) -> Iterator[str]:
    """Commands that are almost right."""
    names = (*game.objects, *game.receptacles)
    while True:
        command = rng.choice(commands)
        verb = command.partition(" ")[0]
        match rng.randrange(16):
            case 0:
                yield command.upper()
            case 1:
                yield command.replace(" ", "  ", 1)
            case 2:
                yield command[:-1]
            case 3:
                yield command + rng.choice((".", " now", "0", "\n", " 1"))
            case 4:
                yield f"\t {command} \n"  # stripped, so it is right
            case 5:
                yield f"{verb} {rng.choice(names)}"
            case 6:
                yield f"take {rng.choice(game.objects)} from {rng.choice(game.receptacles)}"
            case 7:
                yield f"move {rng.choice(game.objects)} to {rng.choice(game.receptacles)}"
            case 8:
                yield f"put {rng.choice(game.objects)} in/on {rng.choice(game.receptacles)}"
            case 9:
                verb, with_what = rng.choice(("heat", "cool", "clean", "slice")), rng.choice(names)
                yield f"{verb} {rng.choice(game.objects)} with {with_what}"
            case 10:
                yield f"{rng.choice(('open', 'close', 'use', 'examine', 'go to'))} {rng.choice(names)}"
            case 11:
                yield f"go {command}"
            case 12:
                yield command.rsplit(" ", 1)[0]
            case 13:
                yield rng.choice(
                    ("goto", "look around", "inv", "i", "l", "examine", "go to", "take", "use", "-")
                )
            case 14:
                yield "".join(rng.sample(command, len(command)))
            case 15:
                yield command.replace("1", "2").replace("to ", "from ")


def drop(play: Play, rng: random.Random) -> Iterator[str]:
    """Puts down what is held, wherever it may lie."""
    game = play.game
    places = [r for r in range(len(game.receptacles)) if play.held is not None and play.accepts(r, play.held)]
    if play.held is not None and places:
        receptacle = rng.choice(places)
        yield from reach(play, receptacle)
        yield f"move {game.objects[play.held]} to {game.receptacles[receptacle]}"


def reach(play: Play, receptacle: int) -> Iterator[str]:
    name = play.game.receptacles[receptacle]
    if play.location != play.game.places[receptacle]:
        yield f"go to {name}"
    if not play.accessible(receptacle):
        yield f"open {name}"


def fetch(play: Play, thing: int, rng: random.Random) -> Iterator[str]:
    """Takes an object in the hand, if it can be."""
    game = play.game
    if play.held == thing:
        return
    yield from drop(play, rng)
    where = [r for r, content in enumerate(play.inside) if thing in content]
    if where and play.held is None and thing in game.flags["pickupable"]:
        receptacle = rng.choice(where)
        yield from reach(play, receptacle)
        yield f"take {game.objects[thing]} from {game.receptacles[receptacle]}"


def slicing(play: Play, rng: random.Random) -> Iterator[str]:
    """Slices something with a knife and looks at what has become of it."""
    game = play.game
    knives = [t for t, kind in enumerate(game.object_types) if kind in ("knife", "butterknife")]
    places = [(t, p) for t, p in sorted(play.lying) if t in game.flags["sliceable"] and p in game.at]
    if knives and places:
        knife, (thing, place) = rng.choice(knives), rng.choice(places)
        yield from fetch(play, knife, rng)
        if play.location != place:
            yield f"go to {game.receptacles[game.at[place][0]]}"
        yield f"slice {game.objects[thing]} with {game.objects[knife]}"
        yield from treating(play, rng, thing)


def treating(play: Play, rng: random.Random, thing: int | None = None) -> Iterator[str]:
    """Heats, cools and cleans something, and looks at it in between."""
    game = play.game
    able = sorted(game.flags["heatable"] | game.flags["coolable"] | game.flags["cleanable"])
    if thing is None and able:
        thing = rng.choice(able)
    if thing is None:
        return
    name = game.objects[thing]
    yield from fetch(play, thing, rng)
    yield f"examine {name}"
    for _ in range(3):
        verb, kind = rng.choice((("heat", "microwave"), ("cool", "fridge"), ("clean", "sinkbasin")))
        where = [r for r, found in enumerate(game.receptacle_types) if found == kind]
        if where:
            receptacle = rng.choice(where)
            if play.location != game.places[receptacle]:
                yield f"go to {game.receptacles[receptacle]}"
            yield f"{verb} {name} with {game.receptacles[receptacle]}"
            yield f"examine {name}"


def shifting(play: Play, rng: random.Random) -> Iterator[str]:
    """Moves something between receptacles of one place, or out of one of the two that it is in; looks."""
    game = play.game
    shared = [rs for rs in game.at.values() if len(rs) > 1]
    twice = [t for t in range(len(game.objects)) if sum(t in content for content in play.inside) > 1]
    if twice and rng.random() < 0.5:
        yield from fetch(play, rng.choice(twice), rng)
    elif shared:
        here = rng.choice(shared)
        things = [t for r in here for t in play.inside[r] if t in game.flags["pickupable"]]
        if things:
            yield from fetch(play, rng.choice(things), rng)
        for r in here:
            yield from reach(play, r)
            if play.held is not None:
                yield f"move {game.objects[play.held]} to {game.receptacles[r]}"
            yield "look"
    yield "look"
    yield "inventory"


def session(
    game: games.Game, walkthrough: list[str], steps: int, errands: int, rng: random.Random
) -> Iterator[str]:
    """The commands of one comparison; sees the native game only."""
    play = Play(game)
    play.reset()

    def bad() -> str:
        return next(near_misses(play.admissible(), game, rng))

    def done(command: str) -> str:
        play.step(command)
        return command

    for command in walkthrough:
        if rng.random() < 0.5:
            yield done(bad())
        yield done(command)
    for errand in rng.sample((slicing, treating, shifting), errands):
        for command in errand(play, rng):
            yield done(command)
    for _ in range(steps):
        if rng.random() < 0.25:
            yield done(rng.choice(BAD_ACTIONS) if rng.random() < 0.2 else bad())
            continue
        by_verb: dict[str, list[str]] = {}
        for command in play.admissible():
            by_verb.setdefault(command.partition(" ")[0], []).append(command)
        usual = {"go": 6, "help": 1, "look": 2, "inventory": 1}
        weights = [usual.get(verb, 4) for verb in by_verb]
        yield done(rng.choice(by_verb[rng.choices(list(by_verb), weights)[0]]))


def compare(
    real: Any, source: Any, data: dict[str, Any], steps: int, errands: int, seed: str
) -> tuple[Counter[str], dict[str, Any], list[Any]]:
    """Plays one game in both: counts and seconds, what to log, and what TextWorld answered.

    Raises AssertionError at a difference.
    """
    rng = random.Random(seed)
    count: Counter[str] = Counter()
    start = time.perf_counter()
    theirs = real("reset", source)  # reads the file, too
    count["reset_real_s"] += time.perf_counter() - start  # type: ignore[assignment]
    start = time.perf_counter()
    game = games.parse(Path(source).read_bytes()) if isinstance(source, str) else games.build(data)
    play = Play(game)
    ours = play.reset(), play.admissible(), play.won()
    count["reset_native_s"] += time.perf_counter() - start  # type: ignore[assignment]
    trail: list[str] = []
    answers: list[Any] = []
    seen = hashlib.sha256()
    for command in (None, *session(game, data.get("walkthrough") or [], steps, errands, rng)):
        if command is not None:
            command = command.encode("utf-8", "replace").decode()
            trail.append(command)
            start = time.perf_counter()
            theirs = real("step", command)
            count["step_real_s"] += time.perf_counter() - start  # type: ignore[assignment]
            start = time.perf_counter()
            ours = play.step(command), play.admissible(), play.won()
            count["step_native_s"] += time.perf_counter() - start  # type: ignore[assignment]
            count["steps"] += 1
            count["changing"] += theirs[0] != "Nothing happens."
        seen.update(json.dumps(theirs).encode())
        answers.append(theirs)
        for what, one, other in zip(("text", "admissible", "won"), theirs, ours, strict=True):
            if one != other:
                raise AssertionError(f"{what} after {trail!r}:\n  textworld {one!r}\n  native    {other!r}")
    count["won"] += ours[2]
    return count, {"commands": trail, "digest": seen.hexdigest()}, answers


def replay(log: Path, args: argparse.Namespace) -> int:
    """Compares the native interpreter with the digests of a log."""
    rows = {row["game"]: row for row in map(json.loads, log.read_text().splitlines())}
    compared = steps = different = 0
    for name, _, _, data in listed(args):
        if (row := rows.get(name)) is None:
            continue
        play = Play(games.build(data))
        seen = hashlib.sha256()
        for command in (None, *row["commands"]):
            text = play.reset() if command is None else play.step(command)
            seen.update(json.dumps((text, play.admissible(), play.won())).encode())
        compared, steps = compared + 1, steps + len(row["commands"])
        if seen.hexdigest() != row["digest"]:
            different += 1
            print(f"DIFFERENT {name}")
    print(f"replayed {compared} of {len(rows)} games, {steps} steps, {different} different")
    return 1 if different or not compared else 0


def write_transcripts(path: Path, transcripts: list[dict[str, Any]]) -> None:
    """JSON lines, compressed, the same bytes for the same content."""
    lines = "".join(json.dumps(t, separators=(",", ":")) + "\n" for t in transcripts)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(lines.encode())


def odd(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A game with facts at the start that the published ones never have, but the domain allows."""
    problem = data["pddl_problem"]
    objects = re.findall(r"^(\w+) - object$", problem, re.MULTILINE)
    openable = re.findall(r"\(openable (\S+)\)", problem)
    states = ("isHot", "isCool", "isClean", "isSliced", "isToggled", "isOn")
    facts = [f"{rng.choice(states)} {rng.choice(objects)}" for _ in range(12)]
    facts += [f"pickupable {o}" for o in objects if "Lamp" in o or "Chair" in o]
    facts += [f"toggleable {o}" for o in objects if "Mug" in o or "Laptop" in o]
    facts += [f"opened {r}" for r in openable if rng.random() < 0.5] + [f"checked {r}" for r in openable[:1]]
    if rng.random() < 0.3:
        facts += [f"holds agent1 {rng.choice(objects)}", "holdsAny agent1"]
    started = "".join(f"({fact})\n" for fact in facts)
    return data | {"pddl_problem": problem.replace("(:init\n", f"(:init\n{started}")}


def listed(args: argparse.Namespace) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """(name, group, what TextWorld loads, its data) of each game to compare."""
    if args.data:
        root = Path(args.data) / "json_2.1.1"
        for split in ("valid_seen", "valid_unseen", "train"):
            paths = sorted((root / split).glob("*/*/game.tw-pddl"))
            if split == "train":
                random.Random(0).shuffle(paths)
            used: Counter[str] = Counter()
            limit = args.train_per_type if split == "train" else args.valid_per_type
            for path in paths:
                kind = path.parts[-3].partition("-")[0]
                if used[kind] < limit:
                    used[kind] += 1
                    yield (
                        "/".join(path.parts[-4:-1]),
                        f"{split}/{kind}",
                        str(path),
                        json.loads(path.read_text()),
                    )
    if args.generated or args.odd:
        from metagym.envs.alfworld import generate

        texts = generate.package_texts()
        for number in range(args.generated):
            for kind in games.TYPES:
                data = generate.file_content(kind, number, *texts)
                yield f"generated/{kind}:{number}", f"generated/{kind}", data, data
        for number in range(args.odd):
            for kind in games.TYPES:
                data = odd(generate.file_content(kind, number, *texts), random.Random(f"{kind}:{number}"))
                yield f"odd/{kind}:{number}", f"odd/{kind}", data, data


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("ALFWORLD_DATA"), help="default: $ALFWORLD_DATA")
    parser.add_argument("--train-per-type", type=int, default=300, metavar="N")
    parser.add_argument("--valid-per-type", type=int, default=10_000, metavar="N")
    parser.add_argument("--generated", type=int, default=10, metavar="N", help="games of each type")
    parser.add_argument("--odd", type=int, default=5, metavar="N", help="odd games of each type")
    parser.add_argument("--steps", type=int, default=20, help="random commands after the walkthrough")
    parser.add_argument("--errands", type=int, default=2, metavar="N", help="of three kinds, in each game")
    parser.add_argument("--exact", action="store_true", help="TextWorld without memoisation")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every Nth game, from the Kth")
    parser.add_argument("--log", type=Path, help="a JSON line for each finished game")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep transcripts, as a test reads them")
    parser.add_argument("--replay", type=Path, metavar="LOG", help="compare with a log instead")
    args = parser.parse_args()
    if args.replay:
        return replay(args.replay, args)
    finished = set()
    if args.log and args.log.exists():
        finished = {json.loads(line)["game"] for line in args.log.read_text().splitlines()}
    process = worker.Worker(
        "metagym.envs.alfworld.real:RealGame", {"fast": not args.exact}, label="alfworld", timeout_s=600
    )
    transcripts: list[dict[str, Any]] = []
    total: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    differences = failures = 0
    part, parts = map(int, args.part.split("/"))
    for number, (name, group, source, data) in enumerate(listed(args)):
        if name in finished or number % parts != part:
            continue
        try:
            count, record, answers = compare(process.call, source, data, args.steps, args.errands, name)
        except (AssertionError, games.BadGame) as error:
            differences += 1
            print(f"DIFFERENT {name}: {error}", flush=True)
            continue
        except WorldError as error:  # TextWorld died or hung: not compared, and not in the log
            failures += 1
            print(f"FAILED {name}: {error}", flush=True)
            continue
        total.update(count)
        total["games"] += 1
        groups[group] += 1
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps({"game": name, "group": group, **count, **record}) + "\n")
        if args.record:
            transcripts.append({"task": name.partition("/")[2], **record, "answers": answers})
        if total["games"] % RECYCLE == 0:
            process.close()
        if total["games"] % 20 == 0:
            print(f"{total['games']} games, {total['steps']} steps, {differences} different", flush=True)
    process.close()
    if args.record:
        write_transcripts(args.record, transcripts)
    for group, games_in in sorted(groups.items()):
        print(f"{group}: {games_in} games")
    print(
        f"{total['games']} games, {total['steps']} steps ({total['changing']} did something), "
        f"{differences} different, {failures} not compared"
    )
    if total["steps"]:
        for what, calls in (("reset", total["games"]), ("step", total["steps"])):
            real, native = (total[f"{what}_{which}_s"] / calls for which in ("real", "native"))
            print(
                f"{what}: textworld {real * 1e3:.1f} ms, native {native * 1e6:.1f} us, "
                f"ratio {real / native:.0f}"
            )
    return 1 if differences or failures or not total["games"] else 0


if __name__ == "__main__":
    sys.exit(main())
