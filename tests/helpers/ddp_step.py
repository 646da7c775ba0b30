"""Run by torchrun, or alone, with the path of a file: take one step of a small recipe and save what it gave."""

import sys

import torch
from safetensors.torch import save_file

from helpers.stripe_dataset import striped_recipe, stripes
from patchguard import runtime
from patchguard.training.augment import BatchRandom
from patchguard.training.curriculum import Stage
from patchguard.training.trainer import Trainer


def main(path: str) -> None:
    torch.set_num_threads(1)
    with runtime.process_group(torch.device("cpu")) as device:
        take_a_step(path, device)  # nothing of it outlives the group


def take_a_step(path: str, device: torch.device) -> None:
    trainer = Trainer(striped_recipe(cutout=3, clip_grad_norm=0.5), stripes(96), device=device)
    # With running statistics in place of those of a part, a batch in two parts is the same function.
    trainer.model.eval()
    images, targets = trainer.loader.first(32)
    random = BatchRandom(torch.Generator().manual_seed(3), 32, trainer.part)
    for step in range(3):
        trainer.step(images[trainer.part], targets[trainer.part], Stage(0.0, 8), 0.1 * (step + 1), random)
    tensors = trainer.state() | {f"gradient.{name}": each.grad for name, each in trainer.model.named_parameters()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{path}.{runtime.rank()}")


if __name__ == "__main__":
    main(sys.argv[1])
