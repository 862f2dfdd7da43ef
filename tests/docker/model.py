"""Writes the model that the containerised engine serves: the small seeded Llama of bench/, with a tokenizer of words.

    python tests/docker/model.py FOLDER     run by a Python that has torch, safetensors and tokenizers

Token n is the word `wn`, so an answer's text names its tokens.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from vllm_model import ModelShape, write_model

SHAPE = ModelShape(layers=3)


def write(folder: Path) -> None:
    """The model's folder, readable by everybody: a container's user is nobody here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    write_model(folder, SHAPE)
    words = WordLevel({f"w{n}": n for n in range(SHAPE.vocabulary)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
