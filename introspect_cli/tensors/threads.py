"""A few threads that share out one kernel call.

The problem: a large tensor wants all cores for a fraction of a millisecond; numba's own parallel layer survives
neither forks nor concurrent calls; and threads of ours must not show in the script's `threading.enumerate()`, hold
up its exit, or be waited for in a forked child. The way: bare threads around a queue, started when first needed.
A call is shared by tickets: whoever is free takes part until the jobs run out, the caller included, and a helper
that the system has not scheduled by then is not waited for.

Another sort of help is a thread in which torch's own operations may be called without the calling thread's OpenMP
workers being started (see `openmp`): each thread has its own.
"""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class _Ticket:
    """One shared call: helpers may join until the caller is through."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._open = True
        self._joined = 0
        self._finished: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Take part, unless it is over."""
        with self._lock:
            if not self._open:
                return
            self._joined += 1
        try:
            self._call()
        finally:
            self._finished.put(None)

    def lead(self) -> None:
        """Take part, then wait for those who joined."""
        try:
            self._call()
        finally:
            with self._lock:
                self._open = False
            for _ in range(self._joined):
                self._finished.get()


def _serve(tickets: SimpleQueue[_Ticket | None], gone: SimpleQueue[None]) -> None:
    """A helper's life: tickets until there is a None."""
    while True:
        ticket = tickets.get()
        if ticket is None:
            gone.put(None)
            return
        ticket.help()
        del ticket


class Helpers:
    """Helper threads; one call is shared at a time.

    Args:
        count: threads beside the caller's.
    """

    def __init__(self, count: int) -> None:
        self._tickets: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._gone: SimpleQueue[None] = SimpleQueue()
        self._count = 0
        for _ in range(count):
            try:
                _thread.start_new_thread(_serve, (self._tickets, self._gone))
            except RuntimeError:  # no more threads to be had, or the interpreter is going down
                break
            self._count += 1

    def share(self, call: Callable[[], object]) -> None:
        """Run a call in this thread and in every helper that gets to it before it is over.

        The call must be one that several threads may run at once, each doing part of the work.
        """
        ticket = _Ticket(call)
        for _ in range(self._count):
            self._tickets.put(ticket)
        ticket.lead()

    def close(self) -> None:
        """End the threads and wait until they have left."""
        for _ in range(self._count):
            self._tickets.put(None)
        for _ in range(self._count):
            self._gone.get()
        self._count = 0


def _answer(calls: SimpleQueue[Callable[[], object] | None], answers: SimpleQueue[BaseException | None]) -> None:
    """Make calls until there is a None, and answer each with what it raised."""
    while True:
        call = calls.get()
        if call is None:
            answers.put(None)
            return
        try:
            call()
        except BaseException as error:  # raised again where the call came from
            answers.put(error)
        else:
            answers.put(None)
        del call


class Stand:
    """A thread that stands in for its caller, who waits; for one caller at a time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._on = False

    def call(self, call: Callable[[], object]) -> None:
        """Make a call in that thread, which is started when first needed; what it raises is raised here."""
        if not self._on:
            try:
                _thread.start_new_thread(_answer, (self._calls, self._answers))
            except RuntimeError:  # as for helpers
                call()
                return
            self._on = True
        self._calls.put(call)
        try:
            error = self._answers.get()
        except BaseException:  # a signal's handler raised; the call still reads what is the caller's
            self._answers.get()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame

    def close(self) -> None:
        """End the thread and wait until it has left."""
        if self._on:
            self._calls.put(None)
            self._answers.get()
            self._on = False
