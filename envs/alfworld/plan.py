"""Shortest plans, by a search of our own.

A plan is the fewest commands that win from where a `Play` is. The search knows only what can matter: the
objects of the goal's type, its lamps and what is held; it goes somewhere only to do something there, so its
steps are "go, open if closed, act". Putting a thing down elsewhere than asked can only pay at once, to free
the hand. Dijkstra's algorithm over that; a tree search in all commands finds nothing shorter (tests).
"""

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from metagym.envs.alfworld.native import Play

_TREATMENT = {  # type -> (verb, flag an object needs, state it gains, receptacle types)
    "pick_clean_then_place_in_recep": ("clean", "cleanable", "isclean", ("sinkbasin",)),
    "pick_heat_then_place_in_recep": ("heat", "heatable", "ishot", ("microwave",)),
    "pick_cool_then_place_in_recep": ("cool", "coolable", "iscool", ("fridge",)),
}


class _State(NamedTuple):
    location: int
    held: int | None
    inside: tuple[frozenset[int], ...]  # of each thing that matters: the receptacles it is in
    done: frozenset[int]  # treated objects, lamps that are on
    opened: frozenset[int]


def shortest(play: Play) -> list[str] | None:
    """The fewest commands that win from here; [] if it is won, None if it can't be."""
    return _Search(play).run()


class _Search:
    def __init__(self, play: Play):
        game = self.game = play.game
        goal = game.goal
        self.play = play
        self.targets = {t for t, kind in enumerate(game.object_types) if kind == goal.target}
        self.treatment = _TREATMENT.get(goal.type)
        self.looking = goal.type == "look_at_obj_in_light"
        gained = play.state["istoggled"]
        if self.treatment:
            self.targets &= game.flags[self.treatment[1]]
            gained = play.state[self.treatment[2]]
        self.lamps = (
            {t for t, kind in enumerate(game.object_types) if kind == goal.place} & game.flags["toggleable"]
            if self.looking
            else set()
        )
        self.goal_receptacles = [r for r, kind in enumerate(game.receptacle_types) if kind == goal.place]
        held = set() if play.held is None else {play.held}
        self.things = sorted(self.targets | self.lamps | held)
        self.at = {t: i for i, t in enumerate(self.things)}
        self.start = _State(
            play.location,
            play.held,
            tuple(frozenset(r for r, c in enumerate(play.inside) if t in c) for t in self.things),
            frozenset(gained & set(self.things)),
            frozenset(play.opened),
        )

    def run(self) -> list[str] | None:
        count = itertools.count()
        queue: list[tuple[int, int, _State, tuple]] = [(0, next(count), self.start, ())]
        seen = set()
        while queue:
            cost, _, state, path = heapq.heappop(queue)
            if state in seen:
                continue
            seen.add(state)
            if self._won(state):
                return _unroll(path)
            for commands, after in self._steps(state):
                if after not in seen:
                    heapq.heappush(queue, (cost + len(commands), next(count), after, (path, commands)))
        return None

    def _won(self, state: _State) -> bool:
        if self.looking:
            here = set(self.game.at.get(state.location, ()))
            return state.held in self.targets and any(
                lamp in state.done and here & state.inside[self.at[lamp]] for lamp in self.lamps
            )
        inside = [(t, state.inside[self.at[t]]) for t in self.targets]
        if self.game.goal.type == "pick_two_obj_and_place":
            return any(sum(r in where for _, where in inside) >= 2 for r in self.goal_receptacles)
        places = set(self.goal_receptacles)
        return any(places & where and (not self.treatment or t in state.done) for t, where in inside)

    def _steps(self, state: _State) -> Iterator[tuple[list[str], _State]]:
        game, held = self.game, state.held
        if held is None:
            for thing in self.targets & game.flags["pickupable"]:
                where = state.inside[self.at[thing]]
                for r in where:
                    before, after = self._approach(state, r, opening=True)
                    take = f"take {game.objects[thing]} from {game.receptacles[r]}"
                    yield [*before, take], self._put(after, thing, where - {r})._replace(held=thing)
        else:
            name = game.objects[held]
            where = state.inside[self.at[held]]
            receptacles = range(len(game.receptacles)) if state == self.start else self.goal_receptacles
            if state == self.start or (held in self.targets and not self.looking):
                for r in receptacles:
                    if self.play.accepts(r, held):
                        before, after = self._approach(state, r, opening=True)
                        move = f"move {name} to {game.receptacles[r]}"
                        yield [*before, move], self._put(after, held, where | {r})._replace(held=None)
            if self.treatment and held in self.targets and held not in state.done:
                verb, _, _, kinds = self.treatment
                for r, kind in enumerate(game.receptacle_types):
                    if kind in kinds:
                        before, after = self._approach(state, r)
                        treat = f"{verb} {name} with {game.receptacles[r]}"
                        yield [*before, treat], after._replace(done=state.done | {held})
        for lamp in self.lamps:
            for r in state.inside[self.at[lamp]]:
                before, after = self._approach(state, r)
                if lamp not in state.done:
                    use = f"use {game.objects[lamp]}"
                    yield [*before, use], after._replace(done=state.done | {lamp})
                elif before:
                    yield before, after

    def _approach(self, state: _State, receptacle: int, opening: bool = False) -> tuple[list[str], _State]:
        """The commands that bring the agent there, opening it if asked to and needed."""
        game, commands = self.game, []
        name, place = game.receptacles[receptacle], game.places[receptacle]
        if place != state.location:
            commands.append(f"go to {name}")
            state = state._replace(location=place)
        if opening and receptacle in game.openable and receptacle not in state.opened:
            commands.append(f"open {name}")
            state = state._replace(opened=state.opened | {receptacle})
        return commands, state

    def _put(self, state: _State, thing: int, where: frozenset[int]) -> _State:
        at = self.at[thing]
        return state._replace(inside=(*state.inside[:at], where, *state.inside[at + 1 :]))


def _unroll(path: tuple) -> list[str]:
    parts: list[list[str]] = []
    while path:
        path, commands = path
        parts.append(commands)
    return [command for commands in reversed(parts) for command in commands]
