"""Train LoRA adapters of a language model on text, as scripts for the Trainer do."""

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
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
rows = [tokenizer(line, truncation=True, max_length=24, return_token_type_ids=False) for line in lines]
rows = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in rows]

config = GPT2Config(
    vocab_size=len(tokenizer),
    n_embd=16,
    n_head=2,
    n_layer=2,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = get_peft_model(
    GPT2LMHeadModel(config),
    LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
)
args = TrainingArguments(
    output_dir="out",
    max_steps=5,
    per_device_train_batch_size=24,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[:24],
    eval_dataset=rows[24:32],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
result = trainer.train()
evaluated = trainer.evaluate()
trainer.save_model("saved")
