"""Losses as sums against PyTorch's means, and raw inputs made from bytes."""

import pytest
import torch
import torch.nn.functional as F

from raypipe.errors import SpecError
from raypipe.models.task import IGNORED, Labels, MaskedToken, NextToken, Sequences, Values

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randint(1, 256, (6, 17), generator=GENERATOR)
KEYS = [7, 8, 9, 10, 11, 12]


def mean(task, output, inputs):
    return task.loss(output, inputs) / task.targets(inputs)


def labels_with_gaps(*shape, classes=5):
    labels = torch.randint(classes, shape, generator=GENERATOR)
    return labels.masked_fill(torch.rand(shape, generator=GENERATOR) < 0.3, IGNORED)


@pytest.mark.parametrize("shape", [(8,), (4, 7)], ids=["one label a sample", "one label a token"])
def test_labels_are_pytorchs_mean_cross_entropy(shape):
    labels = labels_with_gaps(*shape)
    output = torch.randn(*shape, 5, generator=GENERATOR, dtype=torch.float64)
    expected = F.cross_entropy(output.flatten(0, -2), labels.flatten())  # leaves -100 out by itself
    torch.testing.assert_close(mean(Labels(), output, {"labels": labels}), expected, rtol=1e-12, atol=0)


def test_causal_labels_are_hugging_faces_loss():
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    labels = labels_with_gaps(4, 7)
    output = torch.randn(4, 7, 5, generator=GENERATOR)
    expected = loss_utils.ForCausalLMLoss(output, labels, 5)
    torch.testing.assert_close(mean(NextToken({"labels"}), output, {"labels": labels}), expected)
    shifted = torch.randint(5, (4, 7), generator=GENERATOR)
    expected = loss_utils.ForCausalLMLoss(output, labels, 5, shift_labels=shifted)
    torch.testing.assert_close(mean(NextToken(), output, {"shift_labels": shifted}), expected)


@pytest.mark.parametrize("task", [Labels(), NextToken({"labels"})], ids=["labels", "next token"])
def test_micro_batches_add_up_to_the_mini_batch_however_uneven_their_targets(task):
    labels = labels_with_gaps(6, 9)
    labels[:2] = IGNORED  # a micro-batch may have nothing to predict
    output = torch.randn(6, 9, 5, generator=GENERATOR, dtype=torch.float64)
    whole = mean(task, output, {"labels": labels})
    parts = [task.loss(output[i : i + 2], {"labels": labels[i : i + 2]}) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(parts) / task.targets({"labels": labels}), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_values_are_the_mean_squared_error(shape):
    labels = torch.randn(shape, generator=GENERATOR)
    output = torch.randn(shape, generator=GENERATOR)
    torch.testing.assert_close(mean(Values(), output, {"labels": labels}), F.mse_loss(output, labels))
    if len(shape) == 1:  # a model with one output
        column = {"labels": labels}
        torch.testing.assert_close(mean(Values(), output.unsqueeze(-1), column), F.mse_loss(output, labels))


def test_next_bytes_are_the_text_shifted_by_one():
    made = NextToken().from_text(ROWS, KEYS)
    assert torch.equal(made["input_ids"], ROWS[:, :16])
    assert torch.equal(made["shift_labels"], ROWS[:, 1:])


def test_masked_bytes_are_the_labels_and_nothing_else_is():
    task = MaskedToken(mask_token=256, share=0.25)
    text = torch.randint(1, 256, (64, 1025), generator=GENERATOR)
    made = task.from_text(text, list(range(64)))
    masked = made["input_ids"] == 256
    assert torch.equal(torch.where(masked, made["labels"], made["input_ids"]), text[:, :-1])
    assert (made["labels"][~masked] == IGNORED).all()
    assert task.targets(made) == masked.sum()
    assert masked.float().mean().item() == pytest.approx(0.25, abs=0.01)  # 5.9 standard deviations
    assert not torch.equal(masked[0], masked[1])


def test_a_samples_mask_does_not_depend_on_its_neighbours():
    task = MaskedToken(mask_token=256, share=0.25)
    whole = task.from_text(ROWS, KEYS)
    parts = [task.from_text(ROWS[i : i + 1], KEYS[i : i + 1]) for i in range(6)]
    for name, values in whole.items():
        assert torch.equal(values, torch.cat([part[name] for part in parts]))


def test_sequences_go_on_with_the_text_and_the_decoder_reads_what_it_wrote_before():
    task = Sequences(start_token=0, padding=3)
    assert task.window(8) == 16
    made = task.from_text(ROWS, KEYS)
    assert torch.equal(made["input_ids"], ROWS[:, :8])
    assert torch.equal(made["labels"], ROWS[:, 8:16])
    assert torch.equal(made["decoder_input_ids"][:, 1:], made["labels"][:, :-1])
    assert (made["decoder_input_ids"][:, 0] == 0).all()


def test_decoder_inputs_are_hugging_faces():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, decoder_start_token_id=0, pad_token_id=3
    )
    labels = labels_with_gaps(4, 7)
    expected = transformers.T5ForConditionalGeneration(config)._shift_right(labels)
    task = Sequences(start_token=0, padding=3)
    assert torch.equal(task.complete({"labels": labels})["decoder_input_ids"], expected)
    given = {"labels": labels, "decoder_input_ids": labels + 1}
    assert torch.equal(task.complete(given)["decoder_input_ids"], labels + 1)


@pytest.mark.parametrize("task", [Labels(), Values()], ids=["labels", "values"])
def test_bytes_have_no_labels(task):
    with pytest.raises(SpecError, match="bytes have no labels"):
        task.text_fields(8)
