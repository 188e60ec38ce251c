"""Tokenizers and training of the miniature's members: Llama shape, from scratch, on one CPU core."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corpus import CHAT_TEMPLATE, KINDS, SKILLS, held_out, prompt, stream

HELD_OUT = 504
END = "<eos>"
STRONG, WEAK = 0.40, 0.05  # share of each kind of a member's own skill, of the others', in what it is trained on
SEQUENCES, LENGTH = 8, 256
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One member: how it cuts text, and what it is good at."""

    cut: str
    vocab_size: int
    skill: str

    @property
    def weights(self) -> list[float]:
        """Shares of KINDS in its training text."""
        return [STRONG if kind in SKILLS[self.skill] else WEAK for kind in KINDS]


RECIPES = {
    "a": Recipe(cut="bytes, numbers whole", vocab_size=700, skill="sums"),
    "d": Recipe(cut="bytes, digits", vocab_size=700, skill="sums"),
    "b": Recipe(cut="bytes, digits", vocab_size=420, skill="products"),
    "c": Recipe(cut="sentencepiece, digits", vocab_size=900, skill="quotients"),
}


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer, on the same texts for every seed (ties may fall differently)."""
    texts = [drawn.text for drawn in itertools.islice(stream(7, [1.0] * len(KINDS)), 4000)]
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if recipe.cut.startswith("bytes"):
        tokenizer = Tokenizer(models.BPE())
        whole = recipe.cut.endswith("whole")
        tokenizer.pre_tokenizer = byte_level if whole else pre_tokenizers.Sequence([digits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        special, alphabet = [END], pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.Metaspace(prepend_scheme="never")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special, alphabet = [END, *(f"<0x{byte:02X}>" for byte in range(256))], []
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE)


def make_model(vocab_size: int, end: int) -> LlamaForCausalLM:
    """Return an untrained model of 2.3 to 2.4 million weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=None,
            attn_implementation="eager",  # a fifth faster than SDPA at this size on a CPU
        )
    )


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and targets [SEQUENCES, LENGTH]: problems one after another, END between them.

    Only answers are targets (IGNORED elsewhere): what a question's numbers are cannot be learnt.
    """
    problems = stream(1000 + seed, recipe.weights, frozenset(p.question for p in held_out(HELD_OUT)))
    ids: list[int] = []
    targets: list[int] = []
    need = SEQUENCES * LENGTH
    while True:
        while len(ids) < need + 1:
            drawn = list(itertools.islice(problems, 64))
            asked = tokenizer([prompt(p.question) for p in drawn])["input_ids"]
            worked = tokenizer([p.worked for p in drawn])["input_ids"]
            for question, answer in zip(asked, worked, strict=True):
                ids += [*question, *answer, tokenizer.eos_token_id]
                targets += [*([IGNORED] * len(question)), *answer, tokenizer.eos_token_id]
        yield (
            torch.tensor(ids[:need]).view(SEQUENCES, LENGTH),
            torch.tensor(targets[1 : need + 1]).view(SEQUENCES, LENGTH),
        )
        ids, targets = ids[need:], targets[need:]


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is q for q in inner)]
    return [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(name: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Train member `name` and save it in `folder` (safetensors, bfloat16). Returns the last loss and the seconds."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(recipe)
    model = make_model(len(tokenizer), tokenizer.eos_token_id)
    steppers = optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(stepper, lambda s: min(1.0, (s + 1) / 50, (steps - s) / (0.6 * steps)))
        for stepper in steppers
    ]
    began = time.perf_counter()
    losses: list[float] = []
    for step, (ids, targets) in zip(range(steps), batches(recipe, tokenizer, seed), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        for stepper, schedule in zip(steppers, schedules, strict=True):
            stepper.step()
            schedule.step()
            stepper.zero_grad()
        losses.append(loss.item())
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(
                f"{name} seed {seed}: step {step + 1}, loss {mean:.4f}, {time.perf_counter() - began:.0f} s", flush=True
            )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"steps": steps, "loss": sum(losses[-50:]) / 50, "seconds": round(time.perf_counter() - began)}
    (folder / "training.json").write_text(json.dumps(facts), encoding="utf-8")
    return facts
