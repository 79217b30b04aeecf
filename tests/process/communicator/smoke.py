import sys, time, torch, torch.distributed as dist, hashlib
from fleet import run_ranks

def basics(rank):
    rank.init()
    n = rank.size; r = rank.index
    t = torch.arange(10, dtype=torch.int64) + r
    dist.all_reduce(t); assert t.tolist() == [n*i + n*(n-1)//2 for i in range(10)], t
    big = torch.full((3_000_001,), float(r+1)); dist.all_reduce(big); assert (big == n*(n+1)/2).all()
    b = torch.full((700_000,), float(r)); dist.broadcast(b, 1 % n); assert (b == 1 % n).all()
    o = [torch.empty(5) for _ in range(n)]; dist.all_gather(o, torch.full((5,), float(r)))
    assert [x[0].item() for x in o] == list(range(n))
    out = torch.empty(1000); dist.reduce_scatter_tensor(out, torch.arange(1000.*n)); assert torch.equal(out, torch.arange(1000.)*n + 1000*r*n), out
    dist.barrier()
    if n > 1:
        x = torch.full((300_000,), float(r)); y = torch.empty(300_000)
        ops = [dist.P2POp(dist.isend, x, (r+1)%n), dist.P2POp(dist.irecv, y, (r-1)%n)]
        for w in dist.batch_isend_irecv(ops): w.wait()
        assert (y == (r-1)%n).all()
    return True

def ddp(rank):
    rank.init()
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(64,256), torch.nn.ReLU(), torch.nn.Linear(256,8))
    m = torch.nn.parallel.DistributedDataParallel(m, bucket_cap_mb=0.05)
    opt = torch.optim.AdamW(m.parameters())
    torch.manual_seed(rank.index)
    for i in range(5):
        loss = m(torch.randn(16,64)).square().mean(); loss.backward(); opt.step(); opt.zero_grad()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in m.parameters())).hexdigest()

if __name__ == "__main__":
    for machines in (False,):
        for n in (1, 2, 3, 4, 5):
            t=time.time(); print(machines, n, run_ranks(n, basics, machines=machines), round(time.time()-t,1), flush=True)
    print(run_ranks(2, ddp)); print(run_ranks(4, ddp, machines=False))
