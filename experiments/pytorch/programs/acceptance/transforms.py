"""torch.func, sparse and nested tensors, linear algebra, graphs: allocations in shapes that layers do not request."""

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F

from acceptance.common import close, normals, must, program, tokens


@program(gib=4.0)
def per_sample(run):
    """A gradient per sample by vmap over grad, clipped and with added noise, as in private training."""
    width = run.size(512, 8)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)).to(run.device)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss_of(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    generator = torch.Generator(run.device).manual_seed(1)
    for step in range(6):
        rows = run.size((256, 96, 400)[step % 3], 4)
        x, y = normals(step, rows, width).to(run.device), tokens(step, 10, rows).to(run.device)
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        norm = sum(value.flatten(1).square().sum(1) for value in each.values()).sqrt()
        factor = (1 / norm.clamp(min=1)).unsqueeze(1)
        for name, value in each.items():
            clipped = (value.flatten(1) * factor).mean(0).view_as(weights[name])
            noise = torch.randn(clipped.shape, generator=generator, device=run.device)
            weights[name] = weights[name] - 0.1 * (clipped + 0.001 * noise)
        run.loss(norm.mean())


@program(gib=4.0)
def jacobians(run):
    """jvp, vjp, jacrev and hessian of one function; they agree with each other."""
    width = run.size(256, 6)
    first, second = (normals(at, width, width).to(run.device) / width**0.5 for at in range(2))

    def function(x):
        return torch.tanh(torch.tanh(x @ first) @ second)

    for step in range(4):
        x, direction = (normals(10 * step + at, width).to(run.device) for at in range(2))
        value, forward = jvp(function, (x,), (direction,))
        _, back = vjp(function, x)
        whole = jacrev(function)(x)
        must(torch.allclose(whole @ direction, forward, atol=1e-3), "jvp and jacrev differ")
        must(torch.allclose(direction @ whole, back(direction)[0], atol=1e-3), "vjp and jacrev differ")
        curved = hessian(lambda x: function(x).square().sum())(x)
        must(torch.allclose(curved, curved.T, atol=1e-3), "the Hessian is not symmetric")
        for one in (value, forward, whole, curved):
            run.loss(one.double().square().mean())


@program(gib=4.0)
def ensemble(run):
    """Eight models as one, by stacked weights under vmap, each trained on its own batch."""
    width = run.size(512, 8)
    models = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)).to(run.device) for _ in range(8)]
    weights, buffers = stack_module_state(models)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)

    def call(weights, buffers, x):
        return functional_call(models[0], (weights, buffers), (x,))

    for step in range(6):
        x = normals(step, 8, run.size(512 + 256 * (step % 2), 4), width).to(run.device)
        loss = (vmap(call)(weights, buffers, x) - x.mean(-1, keepdim=True)).square().mean()
        run.step(optimizer, loss)


@program(tolerance=1e-3)
def sparse(run):
    """Sparse matrices in three layouts, products with them, and an embedding with sparse gradients."""
    torch.use_deterministic_algorithms(False)
    rows, width, words = run.size(20000, 50), run.size(256, 8), run.size(200_000, 100)
    for step in range(4):
        count = rows * (8 + 8 * step)
        places = tokens(step, rows, 2, count).to(run.device)
        matrix = torch.sparse_coo_tensor(places, normals(step, count).to(run.device), (rows, rows)).coalesce()
        dense = normals(step, rows, width).to(run.device)
        product, rowwise = torch.sparse.mm(matrix, dense), matrix.to_sparse_csr() @ dense
        must(torch.allclose(product, rowwise, rtol=1e-3, atol=1e-2), "two layouts have two products")
        run.loss(product.double().abs().mean())
        run.loss(torch.sparse.sum(matrix, 1).to_dense().square().mean())
    table = nn.Embedding(words, width, sparse=True).to(run.device)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    for step in range(6):
        loss = table(tokens(step, words, run.size(4096, 16)).to(run.device)).square().mean()
        loss.backward()
        must(table.weight.grad.is_sparse, "the gradient is dense")
        optimizer.step()
        optimizer.zero_grad()
        run.loss(loss)


@program(cpu=False, tolerance=1e-2)
def ragged(run):
    """Texts of different lengths in one nested tensor, through layers and attention, padded at the end."""
    width, heads = run.size(512, 32), run.size(8, 2)
    layers = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}).to(run.device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for step in range(5):
        lengths = [16 + (53 * (step + at)) % run.size(400, 30) for at in range(run.size(12, 3))]
        texts = [normals(100 * step + at, length, width) for at, length in enumerate(lengths)]
        x = torch.nested.nested_tensor(texts, layout=torch.jagged, device=run.device)
        with run.autocast():
            q, k, v = (part.unflatten(-1, (heads, width // heads)).transpose(1, 2) for part in layers["qkv"](x).chunk(3, -1))
            out = layers["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        loss = out.to_padded_tensor(0.0).float().square().mean()
        run.step(optimizer, loss)


@program(gib=4.0)
def gaussian_process(run):
    """A handwritten exact Gaussian process: Cholesky, its gradient, and predictions with growing data."""
    count = run.size(2500, 40)
    x = torch.linspace(0, 1, count, device=run.device, dtype=torch.double)
    y = torch.sin(12 * x) + 0.1 * normals(0, count).to(run.device)
    scales = torch.tensor([-1.0, 0.0, -2.0], device=run.device, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([scales], lr=0.1)

    def kernel(a, b):
        length, height, _ = scales.exp()
        return height * torch.exp(-(a.unsqueeze(1) - b).square() / (2 * length.square()))

    for step in range(6):
        some = count * (step + 3) // 8
        matrix = kernel(x[:some], x[:some]) + scales[2].exp() * torch.eye(some, device=run.device, dtype=torch.double)
        factor = torch.linalg.cholesky(matrix)
        weight = torch.cholesky_solve(y[:some].unsqueeze(1), factor)
        loss = 0.5 * (y[:some] @ weight).squeeze() / some + factor.diagonal().log().sum() / some
        run.step(optimizer, loss)
        with torch.no_grad():
            run.loss((kernel(x[-100:], x[:some]) @ weight).square().mean())


@program(needs=("gpytorch",), gib=4.0, seconds=25.0, tolerance=1e-2)
def gpytorch_model(run):
    """The same in gpytorch, with lazy matrices and its own solvers."""
    import gpytorch

    count = run.size(2000, 40)
    x = torch.linspace(0, 1, count).to(run.device)
    y = (torch.sin(12 * x.cpu()) + 0.1 * normals(0, count)).to(run.device)

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(run.device)
    model = Model(likelihood).to(run.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(12):
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
        run.loss(loss)


@program(needs=("torch_geometric",), gib=9.0, seconds=25.0, tolerance=1e-2)
def graph_network(run):
    """torch_geometric's SAGE on a random number of edges per step."""
    from torch_geometric.nn import SAGEConv

    torch.use_deterministic_algorithms(False)
    nodes, edges = run.size(100_000, 50), run.size(1_500_000, 200)
    x, links, y = normals(0, nodes, run.size(128, 8)), tokens(0, nodes, 2, edges), tokens(1, 40, nodes)
    x, links, y = x.to(run.device), links.to(run.device), y.to(run.device)
    width = run.size(256, 8)
    layers = nn.ModuleList([SAGEConv(x.shape[1], width), SAGEConv(width, width), SAGEConv(width, 40)]).to(run.device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    for step in range(6):
        some, out = links[:, : edges * (1 + (5 * step) % 6) // 6], x
        for at, layer in enumerate(layers):
            out = layer(out, some)
            out = out.relu() if at < 2 else out
        loss = F.cross_entropy(out, y)
        run.step(optimizer, loss)


@program(gib=6.0)
def many_shapes(run):
    """Thousands of tensors of sizes from a few bytes to hundreds of MiB, sorted, concatenated, split and convolved by FFT."""
    held = []
    for step in range(run.size(600, 50)):
        size = int(2 ** (4 + 13 * ((step * 7919) % 1000) / 1000)) * (1 if step % 7 else run.size(256, 1))
        held.append(torch.arange(size, device=run.device, dtype=torch.float) % 97)
        if len(held) > 40:
            del held[(step * 31) % 40]
        if step % 50 == 49:
            joined = torch.cat(held)
            ordered = joined.sort().values
            spectrum = torch.fft.rfft(joined[: 1 << 16])
            must(close(ordered.double().sum(), joined.double().sum()), "sorting lost something")
            run.loss(ordered.double().sum())
            run.loss(torch.fft.irfft(spectrum).double().sum())
