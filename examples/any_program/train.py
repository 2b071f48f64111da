"""Train a language model of characters, in plain PyTorch. This file knows nothing of lightning-llm.

python train.py --seed=1 --learning_rate=0.001
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="Train a language model of characters.")
parser.add_argument("--data", default=Path(__file__).with_name("input.txt"), type=Path, help="a text in UTF-8")
parser.add_argument("--out_dir", default="out", type=Path, help="the folder of the checkpoint")
parser.add_argument("--seed", default=1337, type=int)
parser.add_argument("--learning_rate", default=1e-3, type=float)
parser.add_argument("--max_iters", default=300, type=int)
parser.add_argument("--eval_interval", default=100, type=int)
parser.add_argument("--batch_size", default=16, type=int)
parser.add_argument("--block_size", default=64, type=int, help="the longest context, in characters")
parser.add_argument("--n_layer", default=2, type=int)
parser.add_argument("--n_head", default=4, type=int)
parser.add_argument("--n_embd", default=64, type=int)
args = parser.parse_args()


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(args.n_embd)
        self.qkv = nn.Linear(args.n_embd, 3 * args.n_embd)
        self.proj = nn.Linear(args.n_embd, args.n_embd)
        self.norm2 = nn.LayerNorm(args.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(args.n_embd, 4 * args.n_embd), nn.GELU(), nn.Linear(4 * args.n_embd, args.n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, args.n_head, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, head, seq, head size)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The loss of a batch: embeddings, blocks, and a linear layer to one logit per character."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, args.n_embd)
        self.position = nn.Embedding(args.block_size, args.n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(args.n_layer)))
        self.norm = nn.LayerNorm(args.n_embd)
        self.head = nn.Linear(args.n_embd, vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_last = name.endswith(("proj.weight", "mlp.2.weight"))  # its output is added to the residual stream
                nn.init.normal_(weight, std=0.1 / math.sqrt(2 * args.n_layer) if is_last else 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.token(x) + self.position.weight[: x.size(1)]
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


torch.manual_seed(args.seed)
text = args.data.read_text(encoding="utf-8")
characters = sorted(set(text))
ids = torch.tensor([characters.index(character) for character in text])
train, val = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
windows = val[: (len(val) - 1) // args.block_size * args.block_size + 1]
val_x, val_y = windows[:-1].view(-1, args.block_size), windows[1:].view(-1, args.block_size)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = GPT(len(characters)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
print(f"{sum(map(torch.numel, model.parameters()))} parameters, uniform guess: loss {math.log(len(characters)):.4f}")

for step in range(args.max_iters + 1):
    if step % args.eval_interval == 0 or step == args.max_iters:
        with torch.no_grad():
            print(f"step {step}: val loss {model(val_x.to(device), val_y.to(device)):.4f}", flush=True)
    if step < args.max_iters:
        starts = torch.randint(len(train) - args.block_size, (args.batch_size, 1))
        batch = train[starts + torch.arange(args.block_size + 1)].to(device)  # (batch, block + 1)
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

args.out_dir.mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), args.out_dir / "ckpt.pt")
