import time, torch, torch.distributed as dist
from fleet import run_ranks
def one(rank):
    rank.init()
    n=rank.size; r=rank.index; out={}
    for numel in (256, 4096, 65536, 1<<20, 4<<20):
        t=torch.ones(numel); ts=[]
        for i in range(8 if numel> 100000 else 100):
            dist.barrier(); t0=time.perf_counter(); dist.all_reduce(t); ts.append(time.perf_counter()-t0)
        ts.sort(); out[numel*4]=round(ts[len(ts)//4]*1e3,3)
    dist.destroy_process_group()
    return out
if __name__=="__main__":
    for n in (2,4):
        print(n, "shm", run_ranks(n, one, machines=False, timeout_s=60)[0],flush=True)
        print(n, "tcp", run_ranks(n, one, machines=True, timeout_s=60)[0],flush=True)
