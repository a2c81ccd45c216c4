"""Training loops: frameworks' trainers, and handwritten loops around a step."""

import copy
import io
import math
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from acceptance.common import close, normals, gpt, must, program, resnet, text_loss, tokens, train


class Texts(torch.utils.data.Dataset):
    """Random texts in the format of transformers' Trainer."""

    def __init__(self, count, length, words):
        self.count, self.length, self.words = count, length, words

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        text = tokens(index, self.words, self.length)
        return {"input_ids": text, "labels": text.clone()}


class Pictures(torch.utils.data.Dataset):
    """Random pictures with labels."""

    def __init__(self, count, side):
        self.count, self.side = count, side

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return normals(index, 3, self.side, self.side), index % 10


@program(needs=("transformers", "accelerate"), gib=6.0, seconds=35.0)
def hf_trainer(run):
    """transformers' Trainer: Llama, gradient checkpointing, loader workers, checkpoints in between."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    width, words = run.size(768, 32), run.size(32000, 200)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=run.size(6, 2),
        num_attention_heads=run.size(12, 2), max_position_embeddings=1024,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=run.size(12, 4), per_device_train_batch_size=run.size(8, 2), bf16=run.on_gpu,
            gradient_checkpointing=True, logging_steps=2, save_steps=6, report_to=[], dataloader_num_workers=2,
            optim="adamw_torch_fused", seed=0, use_cpu=not run.on_gpu, disable_tqdm=True,
        )  # fmt: skip
        texts = Texts(400, run.size(512, 16), words)
        trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=texts)
        trainer.train()
    for line in trainer.state.log_history:
        if "loss" in line:
            run.loss(line["loss"])


@program(needs=("pytorch_lightning",), gib=4.0, seconds=30.0, tolerance=1e-2)
def lightning(run):
    """PyTorch Lightning: two epochs in fp16 with a validation, loader workers with pinned memory."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = resnet(run.size(64, 4), 10)

        def training_step(self, batch, number):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            run.loss(loss)
            return loss

        def validation_step(self, batch, number):
            self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def loader():
        pictures = Pictures(run.size(384, 16), run.size(96, 16))
        return DataLoader(pictures, run.size(64, 8), num_workers=2, pin_memory=run.on_gpu)

    trainer = pl.Trainer(
        max_epochs=2, precision="16-mixed" if run.on_gpu else 32, accelerator="gpu" if run.on_gpu else "cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader(), loader())


class UNet(nn.Module):
    """A U-Net of three levels with skip connections."""

    def __init__(self, width):
        super().__init__()
        self.down = nn.ModuleList([self.step(3, width), self.step(width, 2 * width), self.step(2 * width, 4 * width)])
        self.up = nn.ModuleList([self.step(6 * width, 2 * width), self.step(3 * width, width)])
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def step(inputs, outputs):
        """A convolution and a norm."""
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](F.avg_pool2d(first, 2))
        out = self.down[2](F.avg_pool2d(second, 2))
        for layer, beside in zip(self.up, (second, first), strict=True):
            out = layer(torch.cat([F.interpolate(out, size=beside.shape[2:]), beside], 1))
        return self.last(out)


@program(gib=10.0)
def moving_average(run):
    """A U-Net on pictures of varying size, with a moving average of its weights, which generates pictures in between."""
    model = UNet(run.size(64, 4)).to(run.device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes = [(12, 96, 160), (16, 128, 128), (8, 192, 96), (8, 256, 256), (12, 320, 192)]
    for step in range(run.size(12, 4)):
        rows, height, width = run.size(sizes[step % len(sizes)], (2, 16, 24))
        x = normals(step, rows, 3, height, width).to(run.device)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        run.loss(loss)
        if step % 4 == 3:
            with torch.inference_mode():
                side = run.size(256, 16)
                run.loss(average(normals(100 + step, run.size(16, 2), 3, side, side).to(run.device)).square().mean())


@program(cpu=False)
def loss_scale(run):
    """fp16 with a gradient scaler, channels last; two steps overflow and are skipped."""
    model = resnet(64).to(run.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=3)
    for step in range(10):
        x = normals(step, 48, 3, 96, 96).to(run.device).to(memory_format=torch.channels_last)
        y = tokens(step, 100, 48).to(run.device)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step in (3, 7):
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.loss(loss)
        run.loss(scaler.get_scale())


@program()
def resume(run):
    """A checkpoint in the middle of training, read into a new model: training resumes unchanged."""

    def fresh():
        model = gpt(run, dropout=0.1)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(model, optimizer, number):
        text = tokens(number, model.vocabulary, run.size(6, 2), run.size(512, 17)).to(run.device)
        with run.autocast():
            loss = text_loss(model, text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def randomness():
        return torch.get_rng_state(), torch.cuda.get_rng_state() if run.on_gpu else None

    model, optimizer = fresh()
    file = io.BytesIO()
    for number in range(3):
        run.loss(step(model, optimizer, number))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": randomness()}, file)
    straight = [step(model, optimizer, number) for number in range(3, 6)]
    del model, optimizer
    if run.on_gpu:
        torch.cuda.empty_cache()
    model, optimizer = fresh()
    file.seek(0)
    saved = torch.load(file, map_location=run.device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    host, gpu = saved["random"]
    torch.set_rng_state(host.cpu())
    if gpu is not None:
        torch.cuda.set_rng_state(gpu.cpu())
    del saved
    resumed = [step(model, optimizer, number) for number in range(3, 6)]
    # Atomic sums differ in the last digits from run to run; lost or exchanged values would differ in the first.
    near = all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(straight, resumed, strict=True))
    must(near, "resumed", resumed, "and straight on", straight)
    for value in resumed:
        run.loss(value)


@program()
def profiled(run):
    """torch.profiler over some steps, with memory and shapes; its results are summed."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    model = gpt(run, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * run.on_gpu
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=activities, schedule=plan, profile_memory=True, record_shapes=True) as profiler:
        for step in range(5):
            text = tokens(step, model.vocabulary, run.size(4, 2), run.size(384, 17)).to(run.device)
            with record_function("a step"), run.autocast():
                loss = text_loss(model, text)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.loss(loss)
            profiler.step()
    seen = {event.key: event.count for event in profiler.key_averages()}
    must(seen.get("a step", 0) >= 2, "the profiler saw", len(seen), "kinds of events, and no step")


@program()
def penalty(run):
    """A gradient of a gradient: the norm of the critic's gradient is a part of its loss."""
    width = run.size(2048, 16)
    critic = nn.Sequential(
        nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
    ).to(run.device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for step in range(8):
        x = normals(step, run.size(512 + 256 * (step % 3), 4), width).to(run.device).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = critic(x.detach()).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.loss(loss)


@program()
def closure(run):
    """L-BFGS, which evaluates the loss many times per step and holds a history of gradients, between accumulated steps."""
    width = run.size(1024, 16)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)).to(run.device)
    x, y = normals(0, run.size(4096, 32), width).to(run.device), normals(1, run.size(4096, 32), 8).to(run.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, history_size=6)

    def loss_of():
        optimizer.zero_grad()
        total = x.new_zeros(())
        for some_x, some_y in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.mse_loss(model(some_x), some_y) / 4
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(4):
        run.loss(optimizer.step(loss_of))


@program(gib=4.0)
def in_backward(run):
    """The optimizer steps within the backward pass, by hooks that free each gradient immediately after use."""
    model = gpt(run, layers=8)
    each = {weight: torch.optim.AdamW([weight], lr=3e-4, foreach=False) for weight in model.parameters()}

    def use(weight):
        each[weight].step()
        each[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(use)

    class Nothing:
        def step(self):
            pass

        def zero_grad(self, set_to_none=True):
            must(all(weight.grad is None for weight in model.parameters()), "a gradient is left")

    train(run, model, Nothing())


@program(seconds=20.0)
def checkpoint_async(run):
    """torch.distributed.checkpoint in a single-process job, written by a thread while training continues, and read back."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if run.on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        width = run.size(2048, 16)
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).to(run.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        saving = None
        for step in range(4):
            loss = model(normals(step, 64, width).to(run.device)).square().mean()
            loss.backward()
            if saving is not None:
                saving.result()
            optimizer.step()
            optimizer.zero_grad()
            run.loss(loss)
            saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{step}")
        saving.result()
        wanted = [float(weight.detach().double().sum()) for weight in model.parameters()]
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=f"{folder}/3")
        read = [float(value.double().sum()) for value in state["model"].values()]
        must(all(map(close, read, wanted)), "what was read is not what was saved")
        dist.destroy_process_group()


@program(needs=("transformers",), gib=5.0, seconds=25.0)
def reinforce(run):
    """Texts are generated with a growing cache, then scored against a frozen model that is moved to the host in between."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, words = run.size(512, 32), run.size(16000, 200)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=run.size(4, 2),
        num_attention_heads=run.size(8, 2),
    )  # fmt: skip
    with run.device:
        model, frozen = (LlamaForCausalLM(config).bfloat16() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for turn in range(run.size(3, 2)):
        frozen.to("cpu")
        if turn == 1 and run.on_gpu:
            torch.cuda.empty_cache()
        prompts = [tokens(10 * turn + at, words, rows, length).to(run.device) for at, (rows, length) in enumerate([(16, 48), (8, 24)])]
        with torch.no_grad():
            texts = [model.generate(prompt, max_new_tokens=run.size(40, 4), do_sample=True, pad_token_id=0) for prompt in prompts]
        frozen.to(run.device)
        for text in texts:
            with torch.no_grad():
                wanted = frozen(text).logits.float().log_softmax(-1)
            told = model(text).logits.float().log_softmax(-1)
            loss = (told.exp() * (told - wanted)).sum(-1).mean()
            run.step(optimizer, loss)
