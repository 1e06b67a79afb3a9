"""A memory shared by two sides of which either may go on at each access, explored exhaustively.

Each side is a function from a state to its next state, and reaches memory only through a `Side`. A
step is one access of one side. `explore` tries every order of steps, and visits each state of the
world once. A side that stands before access n of its function goes on by running the function from
its beginning with the recorded results of the accesses before.

A store may be seen late: it waits in a buffer of its side until a fence, or is written at any
moment before. Stores to different words may be written in any order, as on ARM. A load with
`expect` may be as late as the next fence, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Pairs = tuple[tuple[int, int], ...]  # words and values


class Paused(BaseException):
    """The step of this side is done, or it waits."""


class Position(NamedTuple):
    """Where a side stands: the state its function began in, and the results of its accesses."""

    state: Any  # None: it has ended
    results: tuple[int | None, ...] = ()
    is_waiting: bool = False


class World(NamedTuple):
    memory: tuple[int, ...]
    positions: tuple[Position, Position]
    stores: tuple[Pairs, Pairs] = ((), ())  # by side: not yet seen
    loads: tuple[Pairs, Pairs] = ((), ())  # by side: made once, and perhaps not yet
    message: bool = False  # whether there are unread messages


class Side:
    """One side during one step, which changes `memory`, `stores`, `loads` and `message`."""

    def __init__(self, world: World, number: int):
        self.memory, self.message = list(world.memory), world.message
        self.stores, self.loads = list(world.stores[number]), list(world.loads[number])
        self._position = world.positions[number]
        self._results = list(self._position.results)
        self._index = 0
        self._is_over = self._is_waiting = False

    def take_step(self, function: Function) -> Position:
        """Where the side stands after one access."""
        try:
            return Position(function(self, self._position.state))
        except Paused:
            return Position(self._position.state, tuple(self._results), self._is_waiting)

    def load(self, word: int) -> int:
        value = self._access(lambda: dict(self.stores).get(word, self.memory[word]))
        assert value is not None
        return value

    def expect(self, word: int, value: int) -> None:
        """A load that gives this value, also if it is made as late as the next fence."""

        def check() -> None:
            assert self.memory[word] == value, f"word {word} is {self.memory[word]}, not {value}"
            self.loads.append((word, value))

        self._access(check)

    def store(self, word: int, value: int) -> None:
        self._access(lambda: self.stores.append((word, value)))

    def fence(self) -> None:
        def complete() -> None:
            for word, value in self.loads:
                assert self.memory[word] == value, f"word {word} was written while it was read"
            for word, value in self.stores:
                self.memory[word] = value
            self.loads.clear()
            self.stores.clear()

        self._access(complete)

    def send_message(self) -> None:
        self.fence()  # of the system call
        self._set_message(True)

    def read_messages(self) -> None:
        self._set_message(False)

    def _set_message(self, message: bool) -> None:
        def set_it() -> None:
            self.message = message

        self._access(set_it)

    def wait_for_message(self) -> None:
        if self._index == len(self._results) and not self._is_over and not self.message:
            self._is_over = self._is_waiting = True
        self._access(lambda: None)

    def _access(self, perform: Callable[[], int | None]) -> int | None:
        if self._index == len(self._results):
            if self._is_over:
                raise Paused
            self._results.append(perform())
            self._is_over = True
        self._index += 1
        return self._results[self._index - 1]


Function = Callable[[Side, Any], Any]  # returns the next state, None at the end


def explore(world: World, functions: tuple[Function, Function]) -> Iterator[World]:
    """Try every order of steps; yields the worlds in which neither side can go on."""
    visited, unvisited = {world}, [world]
    while unvisited:
        world = unvisited.pop()
        successors = [*_after_steps(world, functions), *_after_late_stores(world)]
        if not successors:
            yield world
        for successor in successors:
            if successor not in visited:
                visited.add(successor)
                unvisited.append(successor)


def _after_steps(world: World, functions: tuple[Function, Function]) -> Iterator[World]:
    for number, function in enumerate(functions):
        position = world.positions[number]
        if position.state is None or (position.is_waiting and not world.message):
            continue
        side = Side(world, number)
        position = side.take_step(function)
        yield World(
            tuple(side.memory),
            _replaced(world.positions, number, position),
            _replaced(world.stores, number, tuple(side.stores)),
            _replaced(world.loads, number, tuple(side.loads)),
            side.message,
        )


def _after_late_stores(world: World) -> Iterator[World]:
    """One store is seen, for each word the oldest."""
    for number, stores in enumerate(world.stores):
        for index, (word, value) in enumerate(stores):
            if all(word != earlier for earlier, _ in stores[:index]):
                rest = stores[:index] + stores[index + 1 :]
                yield world._replace(
                    memory=_replaced(world.memory, word, value),
                    stores=_replaced(world.stores, number, rest),
                )


def _replaced(values: tuple[Any, ...], index: int, value: Any) -> Any:
    return (*values[:index], value, *values[index + 1 :])
