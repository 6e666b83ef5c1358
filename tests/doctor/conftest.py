from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def checkpoint(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA in Hugging Face's layout with the run's tokenizer; its weights as drawn, larger."""
    pytest.importorskip("transformers")
    from gnmr.lab.config import read
    from gnmr.lab.evaluation.subjects import run_corpus
    from gnmr.lab.models import Llama
    from gnmr.lab.models.pretrained import save

    corpus = run_corpus(run)
    model = Llama(read(run / "config.yaml").model, corpus.vocab_size, 32)
    model.init_weights(torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("checkpoint") / "hf"
    save(model, folder, corpus.tokenizer_path)
    return folder
