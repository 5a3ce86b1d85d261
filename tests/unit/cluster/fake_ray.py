"""The little of Ray that the targets' room uses, in threads of this process: calls of an actor run in order."""

from __future__ import annotations

import threading
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(RayError):
    pass


class _Exceptions:
    RayError, RayTaskError, RayActorError = RayError, RayTaskError, RayActorError


class Actor:
    """An actor whose methods are those of an object made in its own thread."""

    def __init__(self, make: Any) -> None:
        self._dead = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._object: Future[Any] = self._pool.submit(make)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            num_returns = 1

            def options(self, num_returns: int = 1, concurrency_group: str = "") -> Any:
                self.num_returns = num_returns
                return self

            def remote(self, *args: Any) -> Any:
                actor.calls.append(name)
                answer: Future[Any] = Future()
                actor._pool.submit(actor._run, name, args, answer)
                if self.num_returns == 1:
                    return answer
                parts = [Future[Any]() for _ in range(self.num_returns)]
                answer.add_done_callback(lambda whole: _share(whole, parts))
                return parts

        return Method()

    def _run(self, name: str, args: tuple[Any, ...], answer: Future[Any]) -> None:
        if self._dead.is_set():
            answer.set_exception(RayActorError("The actor is dead."))
            return
        try:
            result = getattr(self._object.result(), name)(*args)
        except Exception as error:
            answer.set_exception(RayTaskError(error))
            return
        if self._dead.is_set():
            answer.set_exception(RayActorError("The actor died unexpectedly before finishing this task."))
        else:
            answer.set_result(result)

    def kill(self) -> None:
        self._dead.set()


def _share(whole: Future[Any], parts: list[Future[Any]]) -> None:
    for number, part in enumerate(parts):
        if (error := whole.exception()) is not None:
            part.set_exception(error)
        else:
            part.set_result(whole.result()[number])


class FakeRay:
    """Stands in for the module.

    Attributes:
        actors: All that were started, oldest first.
    """

    exceptions = _Exceptions

    def __init__(self, make: Any = None) -> None:
        self._make = make
        self.actors: list[Actor] = []
        self.options: list[dict[str, Any]] = []
        self.node_list = [{"Alive": True, "Resources": {}, "NodeManagerHostname": "here"}]

    def remote(self, kind: Any = None, **settings: Any) -> Any:
        if kind is None:
            self.settings = settings
            return self.remote
        ray, make = self, self._make or kind

        class Class:
            def options(self, **options: Any) -> Any:
                ray.options.append(options)
                return self

            def remote(self, *args: Any) -> Actor:
                number = len(ray.actors)
                ray.actors.append(Actor(lambda: make(number, *args)))
                return ray.actors[-1]

        return Class()

    def get(self, future: Future[Any]) -> Any:
        return future.result()

    def wait(
        self, futures: list[Future[Any]], timeout: float | None = None, fetch_local: bool = True, num_returns: int = 1
    ) -> Any:
        del fetch_local
        done, left = wait_for(futures, timeout, FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED)
        return list(done), list(left)

    def kill(self, actor: Actor) -> None:
        actor.kill()

    def nodes(self) -> list[dict[str, Any]]:
        return self.node_list
