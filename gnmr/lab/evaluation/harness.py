"""lm-eval's model class over a subject: log-likelihoods, rolling log-likelihoods and greedy generation.

Conventions as in lm-eval's class for Hugging Face models: context and continuation are encoded together and split; what
does not fit is cut off at the beginning; a document longer than the model's context is read in windows that predict
every token once; an empty context is the tokenizer's first token (or its end token).

Batches hold inputs of similar length, longest first, padded on the right, where causal attention does not look.
Requests that differ only in their last token share one pass. **Choice 47**: log-probabilities are computed in FP32
whatever the model's dtype. A path whose forward cast has one scale for a whole tensor scales a batch together with its
padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from gnmr.errors import UserError
from gnmr.lab.evaluation.subjects import Subject

MAX_GENERATED = 256
"""Tokens of an answer where the task says nothing, as in lm-eval."""


class Harness(TemplateLM):
    """lm-eval's view of `subject`. `progress(done, total)` is called after every batch.

    counts: `scored` tokens (of continuations), `read` (of inputs, padding left out), `generated`; `truncated` requests,
    whose beginning did not fit. UserError for a continuation that is longer than the model's context, and for a token
    that the model does not have.
    """

    def __init__(self, subject: Subject, batch_size: int, progress: Callable[[int, int], None] | None = None) -> None:
        super().__init__()
        self.subject, self.size, self.progress = subject, batch_size, progress
        self.counts: Counter[str] = Counter()
        text = subject.text
        self._first = text.decode([self.prefix_token_id], special=True)

    @property
    def eot_token_id(self) -> int:
        return self.subject.text.eos

    @property
    def prefix_token_id(self) -> int:
        bos = self.subject.text.bos
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; with the tokenizer's first token where it wants one and the text does not begin with it."""
        if add_special_tokens is None:
            add_special_tokens = not (self._first and string.startswith(self._first))
        return self.subject.text.encode(string, special=add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.subject.max_length, context_len=1)
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Any]:
        """(log-likelihood in nats, whether greedy decoding gives it) of each (_, context, continuation)."""
        longest = self.subject.max_length
        sharing: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= longest:
                raise UserError(
                    f"{self.subject.name}: a continuation of {len(continuation)} tokens cannot be scored; the model "
                    f"reads {longest} at most"
                )
            tokens = (*context, *continuation)[-(longest + 1) :]
            self.counts["truncated"] += len(tokens) < len(context) + len(continuation)
            self.counts["scored"] += len(continuation)
            sharing.setdefault(tokens[:-1], []).append(number)
        answers: list[Any] = [None] * len(requests)
        done = 0
        for inputs in self._batches(sorted(sharing, key=len, reverse=True)):
            logits_BTV = self._logits(inputs)
            numbers, values, greedy = [], [], []
            for input, logits_TV in zip(inputs, logits_BTV, strict=True):
                for number in sharing[input]:
                    target_N = torch.tensor(requests[number][2], device=logits_TV.device)
                    own_NV = logits_TV[len(input) - len(target_N) : len(input)].float().log_softmax(-1)
                    numbers.append(number)
                    values.append(own_NV.gather(1, target_N[:, None]).sum(dtype=torch.float64))
                    greedy.append((own_NV.argmax(-1) == target_N).all())
            pairs = zip(torch.stack(values).tolist(), torch.stack(greedy).tolist(), strict=True)
            for number, pair in zip(numbers, pairs, strict=True):
                answers[number] = pair
            done += len(numbers)
            self._tell(done, len(requests))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy answers, up to the first of a request's `until` texts or the end token.

        **Choice 48**: an answer takes half of the model's context at most, so that a short context still holds a
        prompt.
        """
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        end = self.subject.text.decode([self.eot_token_id], special=True)
        for number, request in enumerate(requests):
            wanted = request.args[1]
            until = wanted.get("until") or []
            stops = tuple(filter(None, [*([until] if isinstance(until, str) else until), end]))
            alike.setdefault((stops, int(wanted.get("max_gen_toks") or MAX_GENERATED)), []).append(number)
        answers = [""] * len(requests)
        done = 0
        for (stops, most), numbers in alike.items():
            most = min(most, self.subject.max_length // 2)
            room = self.subject.max_length - most
            numbers.sort(key=lambda number: -len(contexts[number]))
            for batch in self._batches(numbers):
                self.counts["truncated"] += sum(len(contexts[number]) > room for number in batch)
                prompts = [contexts[number][-room:] for number in batch]
                for number, text in zip(batch, self._generate(prompts, most, stops), strict=True):
                    answers[number] = text
                done += len(batch)
                self._tell(done, len(requests))
        return answers

    def _generate(self, prompts: list[list[int]], most: int, stops: tuple[str, ...]) -> list[str]:
        def ended(tokens: list[int]) -> bool:
            """Whether an answer needs no further token."""
            if tokens[-1:] == [self.eot_token_id]:
                return True
            text = self.subject.text.decode(tokens)
            return any(stop in text for stop in stops)

        self._check(prompts)
        if self.subject.generate is not None:
            answers = self.subject.generate(prompts, most, ended)
        else:
            answers = self._recompute(prompts, most, ended)
        texts = []
        for tokens in answers:
            if self.eot_token_id in tokens:
                tokens = tokens[: tokens.index(self.eot_token_id)]
            self.counts["generated"] += len(tokens)
            text = self.subject.text.decode(tokens)
            texts.append(text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)])
        self.counts["read"] += sum(map(len, prompts))
        return texts

    def _recompute(self, prompts: list[list[int]], most: int, ended: Callable[[list[int]], bool]) -> list[list[int]]:
        """Token by token, each by a whole forward pass: our models have no cache of keys and values."""
        answers: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        for _ in range(most):
            rows = [(*prompts[row], *answers[row]) for row in going]
            logits_BTV = self._logits(rows, count=False)
            last = torch.tensor([len(row) - 1 for row in rows], device=logits_BTV.device)
            chosen = logits_BTV[torch.arange(len(rows), device=last.device), last].argmax(-1).tolist()
            for row, token in zip(going, chosen, strict=True):
                answers[row].append(token)
            going = [row for row in going if not ended(answers[row])]
            if not going:
                break
        return answers

    def _logits(self, rows: Sequence[Sequence[int]], count: bool = True) -> Tensor:
        """logits_BTV of these inputs, padded on the right."""
        self._check(rows)
        width = max(map(len, rows))
        tokens_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.subject.device)
        if count:
            self.counts["read"] += sum(map(len, rows))
        return self.subject.logits(tokens_BT)

    def _check(self, rows: Iterable[Sequence[int]]) -> None:
        """UserError for unknown tokens: on a GPU one would make the device unusable for this process."""
        largest = max(map(max, rows))
        if largest >= self.subject.vocab_size:
            raise UserError(
                f"{self.subject.name}: the tokenizer gives token {largest}, the model has {self.subject.vocab_size}: "
                "they do not belong together"
            )

    def _batches(self, things: list[Any]) -> Iterable[list[Any]]:
        return (things[start : start + self.size] for start in range(0, len(things), self.size))

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)
