"""The LoRA adapters of this process's model, by name: loaded, listed and unloaded while it serves. Thread: loop.

An adapter is one more card of the model's reader. Requests hold what they run with: unloading takes the card away, so
that later requests find no such model, and the memory goes with the last request under way. Files are read on another
thread (gpu/adapters.py says which, and what is refused).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from core.errors import BadAdapter, ErrorKind, InvalidRequest, ServiceError
from core.types import Adapter
from server.api.models import LoadAdapterBody, adapter_card
from server.clock import Clock
from server.generation import Generations
from server.prompts import PromptReader

logger = logging.getLogger(__name__)

ReadAdapter = Callable[[Path], Adapter]
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(slots=True)
class Adapters:
    """
    Args:
        read: reads a directory's adapter; raises BadAdapter.
        most: in memory at once, with those that requests under way still hold.
        directory: whose subdirectories may be loaded by request; None: nothing is.

    Attributes:
        in_memory: all that have been loaded, as long as anything holds them.
    """

    generations: Generations
    read: ReadAdapter
    most: int
    directory: Path | None
    clock: Clock
    in_memory: WeakSet[Adapter] = field(default_factory=WeakSet)
    _coming: set[str] = field(default_factory=set)  # names of those that are being read

    def __post_init__(self) -> None:
        self.in_memory.update(card.adapter for card in self._reader.cards if card.adapter is not None)

    @property
    def _reader(self) -> PromptReader:
        return self.generations.reader

    async def load(self, asked: LoadAdapterBody) -> None:
        """Read an adapter and serve it from then on.

        Raises:
            ServiceError: its name or path cannot be taken, there is no room, or its files are refused.
        """
        name = asked.lora_name
        if not name.isprintable() or name != name.strip():
            message = "lora_name must be printable characters in one line, without spaces at its ends."
            raise InvalidRequest(message, "lora_name")
        path, root = self._path_of(asked.lora_path)
        served = {card.id: card for card in self._reader.cards}
        is_adapter = name in served and served[name].adapter is not None
        if name in self._coming:
            raise ServiceError(ErrorKind.CONFLICT, f"{name!r} is being loaded already.", "lora_name_taken", "lora_name")
        if (name in served and not is_adapter) or name in self.generations.others:
            raise InvalidRequest(f"{name!r} is the name of another model here.", "lora_name", "lora_name_taken")
        if is_adapter and not asked.load_inplace:
            message = f"An adapter {name!r} is loaded already. Unload it first, or send load_inplace: true."
            raise InvalidRequest(message, "lora_name", "lora_name_taken")
        self._check_room(is_adapter)
        self._coming.add(name)
        try:
            adapter = await self.generations.offload(lambda: self.read(path))
        except BadAdapter as error:
            raise InvalidRequest(error.cause, "lora_path", "invalid_adapter") from error
        finally:
            self._coming.discard(name)
        self.in_memory.add(adapter)
        base = self._reader.cards[0]
        card = adapter_card(base, name, root, adapter, int(self.clock.unix()))
        self._reader.cards = (*(one for one in self._reader.cards if one.id != name), card)
        logger.info("the adapter %r is loaded from %s: %d bytes, %s", name, path, adapter.size_bytes, adapter.digest)

    def unload(self, name: str) -> None:
        """Raises ServiceError: there is no such adapter."""
        cards = self._reader.cards
        if not any(card.id == name and card.adapter is not None for card in cards):
            loaded = ", ".join(card.id for card in cards if card.adapter is not None) or "none"
            message = f"There is no adapter {name[:64]!r} here. Loaded: {loaded}."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "model_not_found", "lora_name")
        self._reader.cards = tuple(card for card in cards if card.id != name)
        logger.info("the adapter %r is unloaded", name)

    def names(self) -> dict[str, str]:
        """Of those that are served, by digest. Any thread."""
        return {card.adapter.digest: card.id for card in self._reader.cards if card.adapter is not None}

    def info(self) -> dict[tuple[str, ...], float]:
        """Of vllm:lora_requests_info: the labels, and the time, as vLLM tells it."""
        names = {card.id for card in self._reader.cards if card.adapter is not None}
        running, waiting = set[str](), set[str]()
        for one in self.generations.active.values():
            if one.model in names:
                (waiting if one.is_queued else running).add(one.model)
        return {(str(self.most), ",".join(sorted(running)), ",".join(sorted(waiting))): self.clock.unix()}

    def _path_of(self, asked: str) -> tuple[Path, str]:
        """The directory, and its name for clients. Its files must lie below the operator's, too: links are followed."""
        if self.directory is None:
            message = "This server does not load adapters on request. Its operator can allow it with --lora-dir DIR."
            raise ServiceError(ErrorKind.PERMISSION, message, "lora_loading_disabled")
        above = self.directory.resolve()
        try:
            path = (above / asked).resolve()
            is_below = all((path / name).resolve().is_relative_to(above) for name in ("", *FILES))
        except (OSError, ValueError, RuntimeError):
            is_below = False
        if not is_below or path == above:
            message = "lora_path must be a directory below the operator's --lora-dir, relative to it or absolute."
            raise InvalidRequest(message, "lora_path")
        return path, path.relative_to(above).as_posix()

    def _check_room(self, is_replacing: bool) -> None:
        """There is memory for one more than `most`, while it replaces another."""
        num_loaded = sum(card.adapter is not None for card in self._reader.cards) - is_replacing
        if num_loaded + len(self._coming) >= self.most:
            message = f"{num_loaded} adapters are loaded, the most that --max-loras allows. Unload one."
            raise ServiceError(ErrorKind.CONFLICT, message, "lora_limit")
        if len(self.in_memory) + len(self._coming) >= self.most + is_replacing:
            message = (
                "The memory of an unloaded adapter is needed, but its requests are still running. Try again later."
            )
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "lora_limit", retry_after_s=1)
