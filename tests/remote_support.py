"""Folders and members for servers that run here."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from model_servers import ModelServer
from safe_llm.backends.kinds import KINDS
from safe_llm.config import MemberConfig, ServerConfig
from safe_llm.member import Member
from safe_llm.vocabulary import Vocabulary


def model_folder(path: Path, tokenizer: Tokenizer, end_ids: list[int], **config: object) -> Path:
    """Write what is needed here of a model that a server holds."""
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    width = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    (path / "config.json").write_text(json.dumps({"vocab_size": width, "eos_token_id": end_ids[0], **config}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    return path


def member_config(server: ModelServer, folder: Path, name: str = "there", **options: object) -> MemberConfig:
    settings = {"url": server.url, "model": "tiny", "top_k": 1000, "timeout_s": 20.0, "max_retries": 0, **options}
    return MemberConfig(model=str(folder), name=name, backend=server.kind, server=ServerConfig(**settings))


def opened(config: MemberConfig):
    """Open a member's server as `Member.load` does."""
    return KINDS[config.backend].open_model(config, Path(config.model), None)


def remote_member(config: MemberConfig, tokenizer: Tokenizer) -> Member:
    model = opened(config)
    vocabulary = Vocabulary(tokenizer, width=model.width, end_ids=model.end_ids)
    return Member(config.display_name, model.connect(vocabulary.symbols, True), vocabulary, device=model.device)
