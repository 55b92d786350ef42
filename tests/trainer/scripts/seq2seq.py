"""Train T5 to write a line backwards, as scripts for the Trainer do."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from transformers import Seq2SeqTrainer

set_seed(3)
lines = [line.strip() for line in open("corpus.txt", encoding="utf-8") if len(line.split()) > 3]
words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(lines, trainers.WordLevelTrainer(vocab_size=200, special_tokens=["[PAD]", "[UNK]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def row(line):
    ids = tokenizer(line, truncation=True, max_length=24)["input_ids"]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids[::-1][:12]}


rows = [row(line) for line in lines[:40]]
config = T5Config(
    vocab_size=len(tokenizer),
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
)
model = T5ForConditionalGeneration(config)


def compute_metrics(found):
    """Of tokens that were generated."""
    length = min(found.predictions.shape[1], found.label_ids.shape[1])
    hits = found.predictions[:, :length] == found.label_ids[:, :length]
    return {"hits": float(hits.mean()), "tokens": float((found.predictions > 0).sum())}


args = Seq2SeqTrainingArguments(
    output_dir="out",
    max_steps=5,
    per_device_train_batch_size=32,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    predict_with_generate=True,
    generation_max_length=10,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=rows[:32],
    eval_dataset=rows[32:],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=compute_metrics,
)
result = trainer.train()
evaluated = trainer.evaluate()
predicted = trainer.predict(rows[32:], max_length=6, num_beams=2)
trainer.save_model()
