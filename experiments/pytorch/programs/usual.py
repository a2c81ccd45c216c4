#!/usr/bin/env python3
"""GPT-2 as online tutorials train it: transformers' model, a DataLoader, torch.cuda.max_memory_allocated() in the loop,
torch.profiler over some steps, a checkpoint that is saved and read back. It runs unchanged under any allocator:

    VRAMLAB_ALLOC=caching python3 experiments/pytorch/programs/usual.py --steps 20
"""

import argparse
import json
import os
import tempfile

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Texts(Dataset):
    """Texts of random words."""

    def __init__(self, count, length, words, seed):
        self.texts = torch.randint(words, (count, length), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    result = train(args.device, args.small, args.seed, args.steps, args.batch, args.length)
    print(json.dumps({"program": "usual"} | result))


def train(device, small, seed, steps, batch_size=8, length=512):
    """Trains for some steps, and returns the losses and PyTorch's measurements."""
    torch.manual_seed(seed)
    device = torch.device(device)
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 200, "n_positions": length} if small else {}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    texts = Texts(steps * batch_size, length, config.vocab_size, seed)
    loader = DataLoader(texts, batch_size=batch_size, num_workers=2, pin_memory=device.type == "cuda")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    losses = []
    with profile(activities=activities, schedule=schedule(wait=2, warmup=1, active=2), profile_memory=True) as profiler:
        for step, batch in enumerate(loader):
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            profiler.step()
            if step % 5 == 0 and device.type == "cuda":
                allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                print(
                    f"step {step}: loss {losses[-1]:.4f}, {allocated / 2**20:.0f} MiB allocated, {reserved / 2**20:.0f} MiB reserved"
                )
    averages = profiler.key_averages()
    print(
        averages.table(sort_by="self_device_memory_usage" if device.type == "cuda" else "cpu_time_total", row_limit=5)
    )

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, path)
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        size = os.path.getsize(path)

    result = {"losses": losses, "checkpoint_bytes": size}
    if device.type == "cuda":
        print(torch.cuda.memory_summary(abbreviated=True))
        result |= {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
            "profiled_bytes": sum(max(0, event.self_device_memory_usage) for event in averages),
            "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }
    return result


if __name__ == "__main__":
    main()
