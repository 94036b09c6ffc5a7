import sys, time, json, torch
from pathlib import Path
from dataclasses import asdict
t=time.time()
from sage_hf.bench import tune
from sage_hf.bench.calls import compile_kernels
from sage_hf.bench.fit_costs import fit
from sage_kernels import costs, registry
from sage_kernels.costs import Table
registry.set_routing(False)
out, seconds = Path(sys.argv[1]), float(sys.argv[2])
tune.RECIPES=("sage2",)
dev=torch.device("cuda")
todo=tune.points()
if __name__=="__main__":
    compile_kernels(dev, tune.calls_to_compile(todo))
    print('compiled',f'{time.time()-t:.0f}s',len(todo),'points')
    found=list(tune.measure_points(dev,todo,seconds))
    print('measured',f'{time.time()-t:.0f}s',len(found),'times of',len({(m.sizes,m.mask,m.causal) for m in found}),'calls')
    (out/'measured.json').write_text(json.dumps([asdict(m) for m in found]))
    p=torch.cuda.get_device_properties(0)
    curves=fit(found,p.multi_processor_count)
    Table(p.name,(p.major,p.minor),tune.versions(),curves).write(out/'9.0.json')
    for c in curves: print(c.runner[:34],c.head_dim,c.mask,c.causal,'%.2f'%c.error)
