"""Held-out programs of `vramlab advise`: `record.py` records them.

The order of random draws, and the lives of tensors in variables of loops, decide the allocations: a variable keeps its
tensor until its next assignment. A change of either makes another program, whose measurements are not those in
`results/advise-truth.jsonl`.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"


def bert_eval():
    """Trains BERT with accumulated gradients, evaluates between, and empties the cache now and then."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_hidden_layers=8, attn_implementation="eager")).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(10):
        model.train()
        for _ in range(3):
            length = random.randint(40, 512)
            batch = random.choice([8, 12, 16, 24])
            tokens = torch.randint(0, 30000, (batch, length), device=DEVICE)
            loss = model(tokens, labels=torch.randint(0, 2, (batch,), device=DEVICE)).loss / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            logits = [
                model(torch.randint(0, 30000, (64, random.randint(20, 512)), device=DEVICE)).logits for _ in range(3)
            ]
            torch.cat(logits)
        if step % 4 == 3:
            torch.cuda.empty_cache()


def vit_ckpt():
    """Trains a vision transformer in mixed precision with checkpoints, on images and batches of varying size."""
    import timm

    model = timm.create_model("vit_base_patch16_224", dynamic_img_size=True).to(DEVICE)
    model.set_grad_checkpointing(True)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
        side = random.choice([160, 192, 224, 256, 288, 320])
        batch = random.choice([16, 24, 32, 48])
        images = torch.randn(batch, 3, side, side, device=DEVICE)
        labels = torch.randint(0, 1000, (batch,), device=DEVICE)
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def lstm_var():
    """Trains an LSTM on texts of varying length."""
    embedding = nn.Embedding(50000, 512).to(DEVICE)
    network = nn.LSTM(512, 1024, 3, batch_first=True).to(DEVICE)
    head = nn.Linear(1024, 50000).to(DEVICE)
    parameters = [*embedding.parameters(), *network.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters)
    for _ in range(24):
        length = random.randint(10, 200)
        batch = random.randint(8, 64)
        tokens = torch.randint(0, 50000, (batch, length), device=DEVICE)
        output, _ = network(embedding(tokens))
        loss = F.cross_entropy(head(output[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def gnn_sample():
    """Trains a graph network on random subgraphs."""
    nodes, width = 400000, 256
    features = torch.randn(nodes, width, device=DEVICE)
    layers = [nn.Linear(width, 512).to(DEVICE), nn.Linear(512, 512).to(DEVICE), nn.Linear(512, 64).to(DEVICE)]
    optimizer = torch.optim.Adam([weight for layer in layers for weight in layer.parameters()])
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        count = int(torch.randint(5000, 60000, (1,), generator=generator))
        degree = int(torch.randint(4, 16, (1,), generator=generator))
        chosen = torch.randint(0, nodes, (count,), device=DEVICE)
        source = torch.randint(0, count, (count * degree,), device=DEVICE)
        target = torch.randint(0, count, (count * degree,), device=DEVICE)
        hidden = features[chosen]
        for number, layer in enumerate(layers):
            messages = layer(hidden)
            sums = torch.zeros_like(messages).index_add(0, target, messages[source])
            hidden = F.relu(sums) if number < 2 else sums
        F.cross_entropy(hidden, torch.randint(0, 64, (count,), device=DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


def load_serve():
    """Quantises weights while loading, then serves requests whose caches grow and end."""
    width = 2048
    layers = []
    for _ in range(24):
        halves = [
            torch.empty(width * random.choice([1, 2, 4]), width, dtype=torch.float16, device=DEVICE).normal_()
            for _ in range(4)
        ]
        floats = [half.to(torch.float32) for half in halves]
        layers.append([(one / one.abs().amax(1, keepdim=True) * 127).round().to(torch.int8) for one in floats])
        del halves, floats
    caches = {}
    with torch.no_grad():
        for step in range(160):
            if len(caches) < random.randint(4, 32):
                caches[step] = [
                    torch.zeros(2, random.randint(16, 900), width, dtype=torch.float16, device=DEVICE) for _ in range(6)
                ]
            for request in list(caches):
                caches[request] = [torch.cat([cache, cache[:, -1:]], 1) for cache in caches[request]]
                if random.random() < 0.06:
                    del caches[request]
            inputs = torch.randn(max(1, len(caches)), width, dtype=torch.float16, device=DEVICE)
            outputs = inputs @ layers[step % 24][0].to(torch.float16)[:width].T  # noqa: F841


def sparse_rec():
    """Trains a recommender with sparse gradients of embeddings."""
    tables = nn.ModuleList(
        [nn.EmbeddingBag(random.choice([20000, 200000, 1000000]), 64, mode="sum", sparse=True) for _ in range(12)]
    ).to(DEVICE)
    top = nn.Sequential(nn.Linear(12 * 64, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(DEVICE)
    sparse = torch.optim.SparseAdam(list(tables.parameters()))
    dense = torch.optim.Adam(top.parameters())
    for _ in range(20):
        batch = random.choice([2048, 4096, 8192, 16384])
        vectors = []
        for table in tables:
            count = random.randint(1, 30)
            vectors.append(table(torch.randint(0, table.num_embeddings, (batch, count), device=DEVICE)))
        F.binary_cross_entropy_with_logits(
            top(torch.cat(vectors, 1)).squeeze(1), torch.rand(batch, device=DEVICE)
        ).backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()


PROGRAMS = {one.__name__: one for one in (bert_eval, vit_ckpt, lstm_var, gnn_sample, load_serve, sparse_rec)}
