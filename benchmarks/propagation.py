"""How fast random networks can be sampled: an nn.Linear loop, explicit weights, and no weights at all.

The experiment is that of Luther and Seung (2019): networks of depth 50 and width 3000 with He's weights, with a
data-dependent scale and bias, and with batch normalisation, forward and backward. ``make bench`` prints the table and
writes ``benchmarks/results.json``. Every entry runs in a process of its own, one after another.

``--slopes T`` times nothing. It keeps the fitted slope of each network at T samples, by the cheaper sampler, beside
what the file already holds.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from initlib import propagate, runtime

SETTINGS = {"He": None, "scale + bias": "scale_and_bias", "batch norm": "batch"}
METHODS = ("nn.Linear loop", "explicit", "weight-free")


class Frozen(nn.Module):
    """Scale and bias of each unit, set from the first batch that comes by."""

    def forward(self, u):
        if not hasattr(self, "scale"):
            variance, mean = torch.var_mean(u.detach(), 0, correction=0)
            self.scale = (variance + 1e-5).rsqrt()
            self.bias = -mean * self.scale
        return u * self.scale + self.bias


def loop(width, depth, samples, normalize, networks):
    """What one would write: a stack of nn.Linear, He's weights, autograd; moments of u and of its gradient."""
    forward, backward = [], []
    for _ in range(networks):
        layers = []
        for _ in range(depth):
            linear = nn.Linear(width, width, bias=False)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers.append(linear)
            if normalize == "batch":
                layers.append(nn.BatchNorm1d(width, affine=False))
            elif normalize == "scale_and_bias":
                layers.append(Frozen())
            layers.append(nn.ReLU())
        x = torch.randn(samples, width)
        us = []
        for layer in nn.Sequential(*layers):
            x = layer(x)
            if isinstance(layer, nn.Linear):
                us.append(x.requires_grad_() if x.is_leaf else x)
                x.retain_grad()
        x.backward(torch.randn_like(x))
        with torch.no_grad():
            forward.append([u.square().mean().item() for u in us])
            backward.append([u.grad.square().mean().item() for u in us])
    return np.array(forward), np.array(backward)


def measure(method, width, depth, samples, normalize, networks):
    """Seconds a network, moments by layer 1 to L, and the largest memory of this process in bytes."""
    propagate([200] * 3, "he_normal", "relu", networks=2, samples=8, sampler="weight_free")  # what loads once
    loop(200, 2, 8, normalize, 1)
    start = time.perf_counter()
    if method == METHODS[0]:
        forward, backward = loop(width, depth, samples, normalize, networks)
    else:
        trace = propagate(
            [width] * (depth + 1),
            "he_normal",
            "relu",
            networks=networks,
            samples=samples,
            normalize=normalize,
            sampler=method.replace("-", "_"),
            seed=METHODS.index(method),
        )
        forward, backward = trace.forward[:, 1:], trace.backward[:, 1:]
    seconds = (time.perf_counter() - start) / networks
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "memory": memory, "forward": forward, "backward": backward}


def apart(job):
    """Measure in a fresh process: its memory is then the method's own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, *job).result()


def slopes(result):
    """Of log E[grad²] against the layer, for each network; the last layer, whose gradient is drawn, left out."""
    logs = np.log(result["backward"])[:, :-1]
    return np.polyfit(np.arange(1, logs.shape[1] + 1), logs.T, 1)[0]


def disagreement(one, other):
    """Largest difference of a statistic between two methods, in standard errors by the spread of the larger sample."""
    depth = one["forward"].shape[1]
    layers = sorted({0, depth // 4, depth // 2, depth - 1})
    worst = 0.0
    for of in (
        slopes,
        *(lambda r, k=k: np.log(r["forward"][:, k]) for k in layers),
        *(lambda r, k=k: np.log(r["backward"][:, k]) for k in layers),
    ):
        a, b = of(one), of(other)
        error = b.std(ddof=1) * math.sqrt(1 / len(a) + 1 / len(b))
        worst = max(worst, abs(a.mean() - b.mean()) / error)
    return worst


def fit(samples, settings, networks, width, depth):
    """One entry a setting, with the slope of every network."""
    entries = []
    for setting in settings:
        trace = propagate(
            [width] * (depth + 1),
            "he_normal",
            "relu",
            networks=networks,
            samples=samples,
            normalize=SETTINGS[setting],
            seed=len(SETTINGS) * samples + list(SETTINGS).index(setting),
        )
        found = slopes({"backward": trace.backward[:, 1:]})
        print(f"T = {samples}, {setting}: {found.mean():+.4f}, {networks} networks", flush=True)
        entry = {"date": date.today().isoformat(), "torch": torch.__version__, "width": width, "depth": depth}
        entries.append({**entry, "samples": samples, "setting": setting, "slopes": found.round(6).tolist()})
    return entries


def known(output):
    """What the file holds, or an empty report."""
    return json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}


def write(output, report):
    output.write_text(json.dumps(report, indent=1, default=float) + "\n", encoding="utf-8")


def rates(samples, width, repeat=20):
    """Of this machine with every thread busy: normal numbers a second, and operations a second in products."""
    threads = torch.get_num_threads()

    def rate(function, amount):
        def work(_):
            for _ in range(repeat):
                function()

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            return threads * repeat * amount / (time.perf_counter() - start)

    square, tall = np.ones((samples, samples), np.float32), np.ones((samples, width), np.float32)
    wide = tall.astype(np.float64)
    flat = tall.T.copy()
    with runtime.one_thread(torch.device("cpu")):
        return {
            "normals": rate(lambda: torch.empty(samples, width).normal_(), samples * width),
            "product_out": rate(lambda: square @ tall, 2 * samples**2 * width),
            "product_in": rate(lambda: tall @ flat, 2 * samples**2 * width),
            "gram": rate(lambda: wide @ wide.T, samples**2 * width),
        }


def floor(rate, width, depth, samples):
    """Least seconds a network: its normal numbers and its products at the rates of this machine, nothing else."""
    product = 2 * samples**2 * width
    numbers = 2 * samples * width / rate["normals"]
    products = 3 * product / rate["product_out"] + 2 * product / rate["product_in"]
    return depth * (numbers + products + 2 * samples**2 * width / rate["gram"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=3000)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 256])
    parser.add_argument("--networks", type=int, default=30, help="of the weight-free sampler")
    parser.add_argument("--few", type=int, default=2, help="networks of the two others")
    parser.add_argument("--widths", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 100_000])
    parser.add_argument("--slopes", type=int, metavar="T", help="keep slopes at T samples, and time nothing")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="for --slopes")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()

    kept = known(options.output).get("slopes", [])
    if options.slopes:
        new = fit(options.slopes, options.settings, options.networks, options.width, options.depth)
        replaced = {(entry["samples"], entry["setting"]) for entry in new}
        kept = [entry for entry in kept if (entry["samples"], entry["setting"]) not in replaced] + new
        write(options.output, known(options.output) | {"slopes": kept})
        return

    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load before": os.getloadavg()[0],
        "width": options.width,
        "depth": options.depth,
    }
    print(", ".join(f"{name} {value}" for name, value in report.items()))
    rows, report["experiment"] = [], []
    for samples in options.samples:
        rate = rates(samples, options.width)
        least = floor(rate, options.width, options.depth, samples)
        for setting, normalize in SETTINGS.items():
            results = {}
            for method in METHODS:
                networks = options.networks if method == METHODS[-1] else options.few
                results[method] = apart((method, options.width, options.depth, samples, normalize, networks))
            reference = results[METHODS[-1]]
            for method, result in results.items():
                slope = slopes(result)
                entry = {
                    "samples": samples,
                    "setting": setting,
                    "method": method,
                    "networks": len(slope),
                    "seconds": result["seconds"],
                    "times faster": results[METHODS[0]]["seconds"] / result["seconds"],
                    "memory": result["memory"],
                    "slope": slope.mean(),
                    "slope s.e.": slope.std(ddof=1) / math.sqrt(len(slope)),
                    "worst of 9, s.e.": None if method == METHODS[-1] else disagreement(result, reference),
                }
                report["experiment"].append(entry)
                rows.append(
                    [
                        *list(entry.values())[:4],
                        f"{entry['seconds']:.3f}",
                        f"{entry['times faster']:.1f}",
                        f"{entry['memory'] / 2**30:.2f}",
                        f"{entry['slope']:+.4f} ± {entry['slope s.e.']:.4f}",
                        "" if method == METHODS[-1] else f"{entry['worst of 9, s.e.']:.1f}",
                    ]
                )
        report.setdefault("rates", {})[samples] = {**rate, "least seconds": least}
    heads = ["T", "setting", "method", "networks", "s/network", "ratio", "GiB", "slope of log E[grad²]", "off, s.e."]
    print(tabulate(rows, headers=heads, disable_numparse=True))
    print("\nslope: per layer, layers 1 to L-1. off: the worst of nine statistics against the weight-free sampler.")
    for samples, rate in report["rates"].items():
        print(
            f"T = {samples}: {rate['normals'] / 1e6:.0f} million normal numbers a second, products at "
            f"{rate['product_out'] / 1e9:.0f} and {rate['product_in'] / 1e9:.0f} GFLOP/s, Gram matrices in double "
            f"precision at {rate['gram'] / 1e9:.0f}: at least {rate['least seconds']:.3f} s a network"
        )

    rows, report["growth"] = [], []
    for width in options.widths:
        result = apart((METHODS[-1], width, options.depth, options.samples[0], None, 1))
        entry = {"width": width, "seconds": result["seconds"], "memory": result["memory"]}
        report["growth"].append(entry)
        weights = 4 * options.depth * width**2
        rows.append([width, f"{entry['seconds']:.2f}", f"{entry['memory'] / 2**30:.2f}", f"{weights / 2**30:.1f}"])
    print(f"\nWeight-free, one network, {options.samples[0]} samples:")
    print(tabulate(rows, headers=["width", "s", "GiB", "GiB its weights would take"], disable_numparse=True))
    write(options.output, report | ({"slopes": kept} if kept else {}))


if __name__ == "__main__":
    main()
