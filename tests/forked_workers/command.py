"""``python -m tests.forked_workers.command ...`` is ``raypipe ...`` whose own Ray, if it starts one, forks its workers.

For runs that are about something else than how Ray starts workers: those take most of a short run's processor time.
"""

from __future__ import annotations

from tests.ray_environment import small_rays


def main() -> None:
    from raypipe.cli import main as command

    with small_rays():
        command()


if __name__ == "__main__":
    main()
