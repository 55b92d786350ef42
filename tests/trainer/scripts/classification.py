"""Fine-tune a classifier as scripts for the Trainer do: the best model by accuracy, evaluation, predictions."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers import Trainer

set_seed(3)
lines = [line.strip() for line in open("corpus.txt", encoding="utf-8") if len(line.split()) > 3]
words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(lines, trainers.WordLevelTrainer(vocab_size=200, special_tokens=["[PAD]", "[UNK]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


class Lines(Dataset):
    """Lines of text; the label is whether one has the word "the". A column that the model does not read beside them."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        encoded = tokenizer(text, truncation=True, max_length=24)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "label": int("the" in text.split()),
            "idx": index,
        }


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": (np.argmax(logits, axis=-1) == labels).mean()}


class Losses(TrainerCallback):
    def __init__(self):
        self.losses, self.accuracies, self.ends = [], [], 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append((state.global_step, logs["loss"]))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.accuracies.append(metrics["eval_accuracy"])

    def on_train_end(self, args, state, control, **kwargs):
        self.ends += 1


config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
train, held_out = Lines(lines[:32]), Lines(lines[32:45])
args = TrainingArguments(
    output_dir="out",
    num_train_epochs=6,
    per_device_train_batch_size=32,
    learning_rate=0.02,
    weight_decay=0.1,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
followed = Losses()
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=held_out,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
    callbacks=[followed, EarlyStoppingCallback(early_stopping_patience=5)],
)
result = trainer.train()
trainer.save_model("saved")
trainer.save_metrics("train", result.metrics)
trainer.save_state()
evaluated = trainer.evaluate()
trainer.log_metrics("eval", evaluated)
predicted = trainer.predict(Lines(lines[48:60]))
