"""One model of the study, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.study.planted import State, make_parts, plant, train
from examples.study.setting import Setting
from megatron_snip.config import Config
from megatron_snip.train.setup import Parts


class Study:
    """The model of a setting in a folder; ``at`` brings it to a checkpoint, with outliers planted."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.parts = make_parts(folder, setting.text, **setting.options())

    def close(self) -> None:
        """End the read-ahead."""
        self.parts.train_loader.close()

    def checkpoint_path(self, checkpoint: str) -> Path:
        """Weights and moments before the checkpoint's iteration, nothing planted."""
        return self.folder / f"{checkpoint}.pt"

    def _train_to(self, checkpoint: str) -> None:
        """Bring the run to a checkpoint; make its file, and those of earlier ones, where they are missing."""
        done = 0
        for name, iteration in sorted(self.setting.checkpoints.items(), key=lambda item: item[1]):
            if iteration > self.setting.checkpoints[checkpoint]:
                break
            if (path := self.checkpoint_path(name)).is_file():
                self._load(name)
                done = iteration - 1
                continue
            loss = train(self.config, self.parts, done + 1, iteration - 1)
            done = iteration - 1
            kept = {"tensors": State(self.parts).tensors, "steps": self.parts.optimizer.steps, "loss": loss}
            torch.save(kept, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            print(f"trained to iteration {done}: loss {loss:.3f}", flush=True)

    @torch.no_grad()
    def _load(self, checkpoint: str) -> None:
        kept = torch.load(self.checkpoint_path(checkpoint))
        for name, tensor in self.parts.tensors().items():
            tensor.copy_(kept["tensors"][name])
        self.parts.optimizer.set_steps(kept["steps"])

    def at(self, checkpoint: str) -> tuple[Config, Parts]:
        """The run at a checkpoint, with outliers planted."""
        self._train_to(checkpoint)
        plant(self.parts, self.setting.planted_seed, self.setting.planted)
        return self.config, self.parts
