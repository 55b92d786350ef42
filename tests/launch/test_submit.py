"""What is submitted, and what is said where it cannot be; ``tests/runtime/runs/test_ray_head.py`` submits to a head."""

import shlex

import pytest

from raypipe.errors import InterruptionError, RunError, SpecError
from raypipe.launch.submit import Submitted, submission, submit


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "one.yaml").write_text("name: one")
    return tmp_path


def test_a_submission_is_the_train_command_in_the_current_folder(folder):
    words = ["train.steps=3", "data.path=my text"]
    what = submission(folder / "jobs" / "one.yaml", words, "/shared/runs/a b", True, None, folder)
    assert shlex.split(what.entrypoint) == [
        "python", "-m", "raypipe", "train", "jobs/one.yaml", "--set", words[0], "--set", words[1],
        "--run-dir", "/shared/runs/a b", "--resume",
    ]  # fmt: skip
    assert what.runtime_env["working_dir"] == str(folder)
    assert ".venv" in what.runtime_env["excludes"]
    assert what.command == f"ray job submit --working-dir {folder} -- {what.entrypoint}"


def test_the_runtime_environment_is_that_of_the_folder_or_as_given(folder):
    (folder / "jobs" / "runtime_env.yaml").write_text("env_vars: {A: '1'}")
    job = folder / "jobs" / "one.yaml"
    assert submission(job, (), None, False, None, folder).runtime_env["env_vars"] == {"A": "1"}
    (folder / "other.yaml").write_text("env_vars: {A: '2'}")
    given = submission(job, (), None, False, folder / "other.yaml", folder)
    assert given.runtime_env["env_vars"] == {"A": "2"}
    assert f"--runtime-env {folder / 'other.yaml'} --" in given.command
    (folder / "other.yaml").write_text("[1]")
    with pytest.raises(SpecError, match="no keys and values"):
        submission(job, (), None, False, folder / "other.yaml", folder)


def test_what_would_be_lost_or_left_behind_is_refused(folder, tmp_path_factory):
    job = folder / "jobs" / "one.yaml"
    with pytest.raises(SpecError, match="goes away with it"):
        submission(job, (), "runs/first", False, None, folder)
    assert "'~/runs/first'" in submission(job, (), "~/runs/first", False, None, folder).entrypoint
    with pytest.raises(SpecError, match="working directory that travels"):
        submission(job, (), None, False, None, tmp_path_factory.mktemp("elsewhere"))


def test_no_job_server_is_one_clear_error(folder, monkeypatch):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    what = submission(folder / "jobs" / "one.yaml", (), None, False, None, folder)
    with pytest.raises(SpecError, match="ray start --head"):
        submit(what, "http://127.0.0.1:9", "one")


class Client:
    """A job server's client whose job ends as told."""

    def __init__(self, status, exit_code=None, raises=None):
        self.status, self.driver_exit_code, self.message, self.raises = status, exit_code, "as told", raises

    async def tail_job_logs(self, job_id):
        yield f"{job_id} "
        if self.raises is not None:
            raise self.raises
        yield "ended\n"

    def get_job_info(self, job_id):
        return self


@pytest.mark.parametrize(("status", "code", "expected"), [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", 1, 1)])
def test_the_exit_status_is_the_jobs(status, code, expected):
    said = []
    assert Submitted(Client(status, code), "raysubmit_1").follow(said.append) == expected
    assert "".join(said) == "raysubmit_1 ended\n"


@pytest.mark.parametrize(
    ("client", "error", "words"),
    [
        (Client("STOPPED"), RunError, "stopped: as told"),
        (Client("FAILED"), RunError, "failed: as told"),
        (Client("RUNNING", raises=RuntimeError("closed")), RunError, "ray job status raysubmit_1"),
        (Client("RUNNING", raises=KeyboardInterrupt()), InterruptionError, "ray job stop raysubmit_1"),
    ],
)
def test_how_else_it_may_end(client, error, words):
    with pytest.raises(error, match=words):
        Submitted(client, "raysubmit_1").follow(lambda text: None)


@pytest.mark.slow
def test_a_head_that_has_just_come_up_is_waited_for(folder, monkeypatch):
    import ray.job_submission

    answers = ["No available agent to submit job, please try again later..", None]

    class Server:
        def __init__(self, address):
            pass

        def submit_job(self, *, entrypoint, runtime_env, metadata):
            if (answer := answers.pop(0)) is not None:
                raise RuntimeError(answer)
            return "raysubmit_2"

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", Server)
    what = submission(folder / "jobs" / "one.yaml", (), None, False, None, folder)
    assert submit(what, None, "one").id == "raysubmit_2"
    answers.append("runtime_env is wrong")
    with pytest.raises(SpecError, match="refuses the job: runtime_env is wrong"):
        submit(what, None, "one")
