"""Batches, and that documents of a sequence do not see each other in a model of transformers."""

from __future__ import annotations

import pytest
import torch

from gnmr.lab.data.batch import IGNORED, Batch, model_inputs


def test_targets_are_counted_when_made() -> None:
    plain = Batch.of_sequences(torch.tensor([[5, 6, 7], [8, 9, 5]]))
    assert plain.tokens.tolist() == [[5, 6], [8, 9]] and plain.targets.tolist() == [[6, 7], [9, 5]]
    assert plain.positions is None and (len(plain), plain.num_targets) == (2, 4)
    targets = torch.tensor([[1, IGNORED], [IGNORED, IGNORED], [3, 4]])
    batch = Batch(torch.zeros(3, 2, dtype=torch.int64), targets, torch.tensor([[0, 0], [0, 1], [0, 1]]))
    assert [part.num_targets for part in (batch, *batch.split(2))] == [3, 1, 2]
    assert [part.positions.tolist() for part in batch.split(2)] == [[[0, 0], [0, 1]], [[0, 1]]]
    on_meta = batch.to("meta")  # a count there would fail
    assert on_meta.tokens.is_meta and on_meta.positions.is_meta and on_meta.num_targets == 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logits_are_those_of_each_document_alone(attention: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).double().train()
    sequences = [[5, 1, 6], [7, 4, 1]]  # lengths of the documents: of one token too, and not the same in each sequence
    positions = torch.tensor([[place for length in lengths for place in range(length)] for lengths in sequences])
    tokens = torch.randint(40, positions.shape)
    batch = Batch(tokens, torch.full_like(tokens, IGNORED), positions)
    tolerance = 1e-12 if attention == "sdpa" else 1e-5  # the eager softmax is float32's
    with torch.no_grad():
        packed = model(**model_inputs(batch)).logits
        mixed = model(**model_inputs(Batch(tokens, batch.targets))).logits
        for row, lengths in enumerate(sequences):
            start = 0
            for length in lengths:
                alone = model(input_ids=tokens[row : row + 1, start : start + length], use_cache=False)
                torch.testing.assert_close(packed[row, start : start + length], alone.logits[0], rtol=0, atol=tolerance)
                if start:  # the check can fail: without positions the documents before are seen
                    assert (mixed[row, start : start + length] - alone.logits[0]).abs().max() > 1e-2
                start += length
