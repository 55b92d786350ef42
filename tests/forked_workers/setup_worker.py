"""What Ray runs in place of ``setup_worker.py`` and ``default_worker.py``: it asks the fork server for the worker.

Ray begins with the former where a worker has a runtime environment, else with the latter. This imports the standard
library only, because it runs for every worker, and ends with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.util import find_spec

SERVER = "RAYPIPE_TESTS_FORK_SERVER"
"""Environment variable with the path of the fork server's socket."""


def main() -> None:
    sets_up, options = sys.argv[1].endswith(".py"), sys.argv[1:]
    if sets_up:
        del options[0]  # the program of workers: this file
    runtime_env = json.loads(_option(options, "--serialized-runtime-env-context") or "{}")
    special = runtime_env.get("command_prefix") or runtime_env.get("py_executable", sys.executable) != sys.executable
    if special or _option(options, "--language") not in ("", "PYTHON"):
        _as_ray_does(sets_up, options)
    own = [word for word in options if not word.startswith(("--serialized-runtime-env", "--language"))]
    asked = {
        "command": [_of_ray("default_worker.py"), *own],
        "environment": {**os.environ, **runtime_env.get("env_vars", {})},
        "directory": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(os.environ[SERVER])
        except OSError as error:
            print(f"the fork server is gone: {error}", file=sys.stderr, flush=True)
            _as_ray_does(sets_up, options)
        words = json.dumps(asked).encode()
        socket.send_fds(server, [len(words).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(words)
        server.recv(1)  # the worker holds the other end as long as it lives


def _option(options: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in options if word.startswith(f"{name}=")), "")


def _of_ray(program: str) -> str:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return os.path.join(os.path.dirname(ray.origin), "_private", "workers", program)


def _as_ray_does(sets_up: bool, options: list[str]) -> None:
    worker = _of_ray("default_worker.py")
    programs = [_of_ray("setup_worker.py"), worker] if sets_up else [worker]
    os.execv(sys.executable, [sys.executable, *programs, *options])


if __name__ == "__main__":
    main()
