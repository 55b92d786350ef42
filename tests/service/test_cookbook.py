"""Three loops of tinker-cookbook 0.6, as they are on PyPI, against ``raypipe serve``: chat, preferences, and a policy.

They are skipped where it is not installed: it needs Python 3.11 and much else. To run them::

    pip install --no-deps 'tinker-cookbook==0.6.*' && pip install blobfile chz datasets pyrage termcolor tiktoken
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook")

import chz
import datasets
import tokenizers
import transformers
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.rl import train as train_rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as train_chat
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from tests.ray_environment import without_ray
from tests.service.serving import Server, serving

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]

NAME, RENDERER = "qwen3", "qwen3_instruct"
COLOURS, NUMBERS = ["red", "green", "blue"], ["one", "two", "three"]
THINGS = ["cat", "dog", "bird", "sky", "sea", "sun"]
WORDS = [*COLOURS, *NUMBERS, *THINGS, "user", "assistant", "system"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256  # as many as bytes have, which the data of a served job are taken for


def tokenizer() -> Any:
    """Words of a small vocabulary, and those that mark turns of a chat."""
    known = {word: number for number, word in enumerate([*SPECIAL, "[UNK]", "\n", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" "), "removed")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [made.pre_tokenizer, tokenizers.pre_tokenizers.Split("\n", "isolated")]
    )
    made.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[2], unk_token="[UNK]")


tokenizer_utils.register_tokenizer(NAME, tokenizer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny Qwen3 in two stages."""
    folder = tmp_path_factory.mktemp("cookbook")
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    job = {
        "name": "cookbook", "model": {"hf": NAME, "sequence": 48, "config": config},
        "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 8},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 4},
    }  # fmt: skip
    (path := folder / "job.json").write_text(json.dumps(job))
    with serving(path, folder, without_ray(RAY_ADDRESS="local"), "--models", "4") as result:
        yield result


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def common(batch: int) -> Any:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=NAME, renderer_name=RENDERER, max_length=40, batch_size=batch
    )


def config(server: Server, folder: Path, **own: Any) -> dict[str, Any]:
    """What the loops' configurations have in common."""
    given = {"log_path": str(folder), "model_name": NAME, "renderer_name": RENDERER, "recipe_name": "test"}
    return {**given, "base_url": server.url, "lora_rank": 0, "save_every": 0, "eval_every": 0, **own}


def logged(folder: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_supervised_chat(server: Server, tmp_path: Path) -> None:
    lines = [{"messages": chat(WORDS[i % 6], f"{WORDS[i % 6]} {WORDS[6 + i % 6]}")} for i in range(96)]
    (file := tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    builder = FromConversationFileBuilder(common_config=common(8), file_path=str(file), test_size=8)
    own = config(server, tmp_path / "log", learning_rate=0.02, save_every=5, eval_every=5, num_epochs=2)
    asyncio.run(train_chat.main(train_chat.Config(dataset_builder=builder, **own)))
    losses = logged(tmp_path / "log", "train_mean_nll")
    assert len(losses) == 22
    assert fmean(losses[-3:]) < 0.5 * fmean(losses[:3]), losses


@chz.chz
class LikesBlue(ComparisonDatasetBuilder):
    """Of two answers, the one with blue is better."""

    def get_train_and_test_datasets(self) -> tuple[Any, None]:
        rows = [{"question": WORDS[6 + i % 6], "other": WORDS[i % 2]} for i in range(96)]
        return datasets.Dataset.from_list(rows), None

    def example_to_labeled_comparison(self, example: dict[str, str]) -> Any:
        prompt, good, bad = ([{"role": role, "content": text}] for role, text in (
            ("user", example["question"]), ("assistant", f"blue {example['question']}"),
            ("assistant", f"{example['other']} {example['question']}"),
        ))  # fmt: skip
        return LabeledComparison(Comparison(prompt, good, bad), "A")


def test_preferences(server: Server, tmp_path: Path) -> None:
    builder = DPODatasetBuilderFromComparisons(common_config=common(8), comparison_builder=LikesBlue())
    own = config(server, tmp_path / "log", learning_rate=0.005)
    train_dpo.main(train_dpo.Config(dataset_builder=builder, **own))
    losses = logged(tmp_path / "log", "dpo_loss")
    assert len(losses) == 12
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference
    assert losses[-1] < 0.6, losses
    assert logged(tmp_path / "log", "accuracy")[-1] == 1.0


class SaysWords(ProblemEnv):
    """The answer ought to have a word in it: most tokens of the vocabulary have none."""

    def get_question(self) -> str:
        return "sky"

    def check_answer(self, sample_str: str) -> bool:
        return any(word in sample_str for word in WORDS)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return WORDS[0]


class Skies(RLDataset):
    """One question, asked in every batch."""

    def get_batch(self, index: int) -> list[Any]:
        renderer = renderers.get_renderer(RENDERER, tokenizer())
        return [ProblemGroupBuilder(lambda: SaysWords(renderer), num_envs=16) for _ in range(2)]

    def __len__(self) -> int:
        return 12


@chz.chz
class SkiesBuilder(RLDatasetBuilder):
    """Makes ``Skies``."""

    async def __call__(self) -> tuple[RLDataset, None]:
        return Skies(), None


def test_a_policy_on_a_toy_reward(server: Server, tmp_path: Path) -> None:
    own = config(server, tmp_path / "log", learning_rate=0.02, max_tokens=6)
    asyncio.run(train_rl.main(train_rl.Config(dataset_builder=SkiesBuilder(), **own)))
    rewards = logged(tmp_path / "log", "env/all/reward/total")
    assert len(rewards) == 12
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.3, rewards
