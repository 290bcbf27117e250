"""Tables of speed: steps per second, milliseconds, how busy the GPU is. Each function writes the block of its name."""

from __future__ import annotations

from statistics import mean

from figure_delivered import FULL, compared_with_sb3, delivered, share_of_loop
from figure_values import number, percent, rates, results, rows, source, sourced, table, times


@table
def speed_in_short() -> str:
    """One row per kind of work; each links to a table with machine, date and caveats."""
    beast, on_host = delivered("beast"), results("two_cores")["training"]
    cheetah = results("cpu_bound")["settings"]["beast"]
    sides = [cheetah[side]["steps_per_second"] for side in ("off", "sb3")]
    if beast:
        sides = [beast["medians"][side]["steps_per_second"] for side in ("off", beast["sb3"])]
    seconds, crawling = results("time_to_score")["sides"], results("io_bound_gpu")["sides"]
    on_device = results("gpu_resident")["n_envs"]["4096"]
    gpu, cores = "one H200 with 16 cores", "two cores"

    def row(work: str, unit: str, sides: list[float], other: str, page: str, ratio: float | None = None) -> list[str]:
        ours, theirs = (number(side, 1 if side < 100 else 0) for side in sides)
        faster = number(ratio or sides[0] / sides[1], 1)
        return [work, f"{ours} {unit}", f"{theirs} {unit}, {other}", f"[{faster} ×](docs/{page})"]

    first, last = (seconds[side]["median_seconds"] for side in ("unidle", "sb3"))
    return rows(
        ["PPO on", "unidle", "compared with", "faster by"],
        row(
            f"HalfCheetah-v5, 64 environments, 1024,512,512,256 (preset `beast`), {gpu}"
            + (", evaluation and checkpoints included" if beast else ""),
            "steps/s",
            sides,
            "Stable-Baselines3",
            "benchmarks.md#halfcheetah-on-a-gpu",
        ),
        row(
            f"HalfCheetah-v5, 8 environments, 64,64 (preset `classic`), {cores}",
            "steps/s",
            [on_host[side]["steps_per_second"] for side in ("unidle", "sb3 dummy")],
            "Stable-Baselines3",
            "benchmarks.md#two-cores-without-a-gpu",
        ),
        row(
            f"CartPole-v1 to a mean return of 475, {cores}",
            "s",
            [first, last],
            "Stable-Baselines3",
            "benchmarks.md#two-cores-without-a-gpu",
            last / first,
        ),
        row(
            f"a website with 50 ms latency, crawled by 2,048 concurrent episodes against {processes(crawling)}, {gpu}",
            "steps/s",
            [crawling[side]["steps_per_second"] for side in ("unidle 2048", best_sb3(crawling))],
            "Stable-Baselines3",
            "io-bound.md#pages-are-read-once",
        ),
        row(
            "4,096 CartPoles on the GPU, one H200 (one kernel per rollout: only for the five classic tasks with two "
            "equal layers of 16, 32 or 64 units)",
            "M steps/s",
            [rates(on_device[side]) / 1e6 for side in ("unidle", faster_jax(on_device))],
            "PureJaxRL-style JAX",
            "benchmarks.md#cartpole-on-the-gpu",
        ),
    )


@table
def speed_on_a_gpu() -> str:
    """HalfCheetah and crawling against SB3, and how busy the GPU is."""
    cheetah, crawling = results("cpu_bound")["settings"], results("io_bound_gpu")["sides"]
    sb3 = {preset: cheetah[preset]["sb3"] for preset in ("fast", "heavy", "beast")}

    def cell(side: dict[str, float]) -> str:
        return f"{number(side['steps_per_second'])} ({percent(side['profiled_gpu_overall'])})"

    def ratio(side: dict[str, float], baseline: dict[str, float]) -> float:
        return side["steps_per_second"] / baseline["steps_per_second"]

    def compared(name: str, side: dict[str, float], baseline: dict[str, float]) -> list[str]:
        return [name, cell(side), cell(baseline), times(ratio(side, baseline))]

    measured = {preset: row for preset in sb3 if (row := delivered(preset))}
    beast, wide = cheetah["beast"], cheetah["wide"]["strict"]

    def plain(preset: str, note: str = "", overlap: str = "off") -> list[str]:
        """A preset as `unidle train` delivers it, or, until that is measured, its training loop alone."""
        name = f"HalfCheetah-v5, preset `{preset}`{note}"
        if preset in measured:
            return compared_with_sb3(measured[preset], f"{name}: {FULL}", "delivered")
        return compared(name, cheetah[preset][overlap], sb3[preset])

    off = ["the same with `--overlap off`", cell(beast["off"]), "", times(ratio(beast["off"], sb3["beast"]))]
    other = "`beast` with 1024 × 32 steps instead of 64 × 512 (a different recipe)"
    widest = [other, cell(wide), "", f"{number(ratio(wide, sb3['beast']), 1)} times SB3 with `beast`"]
    if "beast" in measured:
        off = compared_with_sb3(measured["beast"], off[0], "off")
        widest[0], widest[2] = f"{other}, training loop only", cell(sb3["beast"])
    pages = compared(
        f"Crawling a website with 50 ms latency: 2,048 concurrent episodes against {processes(crawling)}, network and "
        "epochs of `max-gpu`",
        crawling["unidle 2048"],
        crawling[best_sb3(crawling)],
    )
    pages[-1] = f"[{pages[-1]}](docs/io-bound.md#pages-are-read-once)"
    loops = {preset: machine for preset, machine in results("cpu_bound")["machines"].items() if preset not in measured}
    return sourced(
        rows(
            ["training steps/s (GPU busy)", "unidle", "Stable-Baselines3", ""],
            plain("fast"),
            plain("heavy"),
            plain("beast", " (`--overlap strict`, its default on a GPU)", "strict"),
            off,
            widest,
            pages,
        ),
        *([f"{source('delivered.py', 'delivered', measured)} {share_of_loop(measured)}"] if measured else []),
        source("cpu_bound.py", "cpu_bound", loops),
        source("io_bound_gpu.py", "io_bound_gpu"),
    )


@table
def several_seeds() -> str:
    """Runs of a group on HalfCheetah against one run, and against processes under NVIDIA MPS, all steps together."""
    return _groups(
        {"fast": "PPO, `fast`", "heavy": "PPO, `heavy`", "beast": "PPO, `beast`", "sac": "SAC, `sac`"},
        "HalfCheetah-v5",
        {"mps": "as many processes under MPS", "bare": "only stepping"},
    )


@table
def several_seeds_on_the_device() -> str:
    """Runs of a group with environments on the GPU against one run, and against JAX's `vmap` over seeds."""
    return _groups({"cartpole": "64,64 tanh"}, "2,048 CartPoles per run", {"jax": "as many seeds in JAX, with `vmap`"})


def _groups(settings: dict[str, str], task: str, others: dict[str, str]) -> str:
    """Rows for one run and for groups, with a column for each of the other sides that was measured."""
    result = results("many_runs")
    measured = {name: result[name]["measured"] for name in settings}
    others = {
        side: head
        for side, head in others.items()
        if any(key.startswith(side) for row in measured.values() for key in row)
    }
    body = []
    for name, of_setting in measured.items():
        one = of_setting["one 1"]["steps_per_second"]
        for side in sorted(filter(lambda side: side.startswith(("one", "group")), of_setting), key=_runs_of):
            runs = _runs_of(side)
            rate, gpu = of_setting[side]["steps_per_second"], of_setting[side]["gpu_percent"] / 100
            found = [of_setting.get(f"{other} {runs}") if runs > 1 else None for other in others]
            cells = [number(other["steps_per_second"]) if other else "" for other in found]
            body.append([settings[name], str(runs), number(rate), f"{number(rate / one, 2)} ×", percent(gpu), *cells])
    heads = [task, "seeds", "steps/s in all", "against one run", "GPU in use", *others.values()]
    return sourced(rows(heads, *body), source("many_runs.py", "many_runs"))


def _runs_of(side: str) -> int:
    return int(side.split()[1])


@table
def speed_on_two_cores() -> str:
    """HalfCheetah and CartPole against SB3 without a GPU."""
    trained, seconds = results("two_cores")["training"], results("time_to_score")["sides"]
    ours, strict, sb3 = (trained[side]["steps_per_second"] for side in ("unidle", "unidle strict", "sb3 dummy"))
    first, last = (seconds[side]["median_seconds"] for side in ("unidle", "sb3"))
    n = len(seconds["unidle"]["seconds"])
    return sourced(
        rows(
            ["two cores without a GPU", "unidle", "Stable-Baselines3", ""],
            [
                "HalfCheetah-v5, preset `classic`, 8 environments: training steps/s",
                number(ours),
                number(sb3),
                times(ours / sb3),
            ],
            ["the same with `--overlap strict`", number(strict), "", times(strict / sb3)],
            [
                f"CartPole-v1: seconds from the command to a mean return of 475, median of {n} seeds",
                number(first, 1),
                number(last, 1),
                times(last / first),
            ],
        ),
        source("two_cores.py", "two_cores", results("two_cores")["machine"]),
        source("time_to_score.py", "time_to_score"),
    )


@table
def off_policy_on_two_cores() -> str:
    """DQN, SAC and TD3 against SB3 on a CPU, environments included."""
    body = []
    for name, row in results("off_policy_end_to_end")["tasks"].items():
        env, algo = name.split()
        ours, theirs = (row["medians"][side]["cpu_ms_per_step"] for side in ("unidle", "sb3, 1 thread"))
        body.append([f"{algo.upper()}, {env}", number(ours, 2), number(theirs, 2), times(row["cpu_ratio"])])
    return sourced(
        rows(["ms of CPU time per step", "unidle", "Stable-Baselines3", ""], *body),
        source("off_policy_end_to_end.py", "off_policy_end_to_end"),
    )


def faster_jax(sides: dict[str, list[dict[str, float]]]) -> str:
    """JAX with the generator of random numbers with which it is faster."""
    return max((side for side in sides if side.startswith("jax")), key=lambda side: rates(sides[side]))


@table
def cartpole_on_a_gpu() -> str:
    """CartPole on the device against JAX and RSL-RL."""
    sizes = results("gpu_resident")["n_envs"]
    jax = sizes["4096"]["jax"][0]["jax"].rpartition(".")[0]
    generators = {faster_jax(size) for size in sizes.values()} if "jax-rbg" in sizes["4096"] else set()
    jax += "".join(f", {'rbg' if name == 'jax-rbg' else 'threefry'}" for name in sorted(generators))
    rsl = f"RSL-RL {sizes['4096']['rsl-rl'][0]['rsl-rl-lib']}, its own settings"
    shares = [size["rsl-rl"][0].get("environment_share") for size in sizes.values()]
    if None in shares:
        rsl += ", without TF32"
    else:
        alone = " and ".join(
            percent(mean(run["environment_share"] for run in size["rsl-rl"])) for size in sizes.values()
        )
        rsl += f", captured environment, which takes {alone} of the time"

    def side(name: str, key: str | None, slower: bool = True) -> list[str]:
        cells = []
        for size in sizes.values():
            rate = rates(size[key or faster_jax(size)])
            ratio = rates(size["unidle"]) / rate
            cells.append(
                f"{number(rate / 1e6, 1)} M"
                + (f", {number(ratio, 1 if ratio < 10 else 0)} times slower" if slower else "")
            )
        return [name, *cells]

    return sourced(
        rows(
            [
                "CartPole on the GPU, 32 steps × 4 epochs × 4 minibatches, 64,64 tanh: training steps/s",
                *(f"{int(size):,} environments" for size in sizes),
            ],
            side("unidle", "unidle", slower=False),
            side("unidle, `--precision bf16`", "unidle-bf16", slower=False),
            side(f"PureJaxRL-style JAX: the whole run in one `jit`, JAX {jax}, gymnax", None),
            side(rsl, "rsl-rl"),
        ),
        source("gpu_resident.py", "gpu_resident"),
    )


@table
def parts_of_an_iteration() -> str:
    """Where an iteration of CartPole on the device spends its time."""
    sizes = results("gpu_resident")["n_envs"]
    names = {name: name for name in ("rollout", "values and advantages", "shuffles", "learning")}

    def cells(part: str) -> list[str]:
        found = [size["parts"][part] for size in sizes.values()]
        return [text for it in found for text in (number(it["ms"], 2), number(it["least_ms"], 3))]

    return sourced(
        rows(
            [
                "milliseconds",
                *(text for size in sizes for text in (f"{int(size):,} environments", "lower bound")),
            ],
            *([name, *cells(part)] for name, part in (names | {"whole iteration": "iteration"}).items()),
        ),
        source("gpu_resident.py", "gpu_resident"),
    )


@table
def overlap_speed() -> str:
    """HalfCheetah with strict overlap, without, and with SB3."""
    settings = results("cpu_bound")["settings"]
    names = {
        "fast": ("preset `fast`", "16 × 256"),
        "heavy": ("preset `heavy`", "32 × 256"),
        "old": ("256,256, 10 epochs of batches of 516 (SB3: 512)", "48 × 43"),
        "beast": ("preset `beast`", "64 × 512"),
        "wide": ("`beast` with `--n-envs 1024 --n-steps 32`, another recipe", "1024 × 32"),
    }
    return sourced(
        rows(
            ["training steps/s", "environments × steps", "off", "strict", "SB3"],
            *(
                [
                    *name,
                    *(
                        number(settings[key][side]["steps_per_second"]) if side in settings[key] else ""
                        for side in ("off", "strict", "sb3")
                    ),
                ]
                for key, name in names.items()
            ),
        ),
        source("cpu_bound.py", "cpu_bound", results("cpu_bound")["machines"]),
    )


@table
def mt10_speed() -> str:
    """MT10 by number of environments, without evaluations."""
    speeds = results("metaworld_training")["speed"]
    return sourced(
        rows(
            ["environments", "steps/s", "hours for 20 million steps at that rate", "GPU busy", "GPU memory"],
            *(
                [
                    n_envs,
                    number(speed["steps_per_second"]),
                    number(speed["hours_for_20m"], 2),
                    percent(speed["gpu_active"]),
                    f"{number(speed['gpu_memory_mib'] / 1024, 1)} GiB",
                ]
                for n_envs, speed in sorted(speeds.items(), key=lambda item: int(item[0]))
            ),
        ),
        source("metaworld_training.py", "metaworld_training"),
    )


@table
def crawling_on_two_cores() -> str:
    """Stepping the crawler against SB3."""
    sides = results("io_bound")["sides"]
    sb3 = sides["sb3"]
    names = {
        "one loop": "one event loop",
        "a loop per core": "one loop per core",
        "one loop, no cache": "one event loop, no cache",
        "a loop per core, no cache": "one loop per core, no cache",
        "sb3": "SB3, 32 processes, `requests` and BeautifulSoup",
    }
    return sourced(
        rows(
            ["256 episodes", "steps/s", "against SB3", "CPU time per step", "additional memory", "of SB3's"],
            *(
                [
                    name,
                    number(sides[key]["steps_per_second"]),
                    f"{number(sides[key]['steps_per_second'] / sb3['steps_per_second'], 1)} ×",
                    f"{number(sides[key]['cpu_ms_per_step'], 2)} ms",
                    f"{number(sides[key]['added_mib'])} MiB",
                    percent(sides[key]["added_mib"] / sb3["added_mib"]),
                ]
                for key, name in names.items()
            ),
        ),
        source("io_bound.py", "io_bound"),
    )


def best_sb3(sides: dict[str, dict[str, float]]) -> str:
    """SB3 with the number of processes and the parser with which it is fastest."""
    return max((side for side in sides if side.startswith("sb3")), key=lambda side: sides[side]["steps_per_second"])


def processes(sides: dict[str, dict[str, float]]) -> str:
    """The fastest SB3 in words: 128 processes with selectolax."""
    _, size, *parser = best_sb3(sides).split()
    return " with ".join([f"{size} processes", *parser])


@table
def crawling_on_a_gpu() -> str:
    """Training on the crawler against SB3."""
    sides = results("io_bound_gpu")["sides"]
    sb3 = sides[best_sb3(sides)]["steps_per_second"]
    names = {}
    for side in sorted(sides, key=lambda side: side.split()[0]):  # those of SB3 first
        kind, size, *option = side.split()
        several = f"SB3, {size} processes" if kind == "sb3" else f"{int(size):,} episodes"
        words = {"no cache": "`keep_pages: false`"}.get(" ".join(option), " ".join(option))
        names[side] = ", ".join(filter(None, [several, words]))
    return sourced(
        rows(
            [
                "",
                "training steps/s",
                "against SB3",
                "GPU busy",
                "power",
                "memory of all environments",
                "cores used by trainer, environments",
            ],
            *(
                [
                    name,
                    number(side["steps_per_second"]),
                    f"{number(side['steps_per_second'] / sb3, 1)} ×",
                    percent(side["profiled_gpu_overall"]),
                    f"{number(side['watts'])} W",
                    f"{number(side['pool_mib'])} MiB",
                    f"{number(side['trainer_cores'], 1)}, {number(side['pool_cores'], 1)}",
                ]
                for name, side in ((name, sides[key]) for key, name in names.items())
            ),
        ),
        source("io_bound_gpu.py", "io_bound_gpu"),
    )


@table
def predictions_on_a_gpu() -> str:
    """Predictions of `unidle diagnose`, and what was measured."""
    names = {
        "beast, one worker": "HalfCheetah-v5, `beast`, one worker",
        "beast, graphs off": "`beast`, graphs off",
        "heavy, four workers": "`heavy`, four workers",
        "sac, one worker": "`sac`, 16 environments, one worker",
        "sac, graphs off": "`sac`, 16 environments, graphs off",
        "TF32 off": "fp32 without TF32",
        "tiny minibatches": "minibatches of 4",
        "burning, one worker": "steps that compute 4 ms, one worker",
    }
    jobs = results("predictions_gpu")["jobs"]
    return sourced(
        rows(
            ["job", "advice", "predicted", "measured", "interval"],
            *(
                [
                    name,
                    f"`{jobs[key]['flags']}`",
                    f"{number(jobs[key]['predicted'], 2)} ×",
                    f"{number(jobs[key]['measured']['mean'], 2)} ×",
                    f"{number(jobs[key]['measured']['low'], 1)} … {number(jobs[key]['measured']['high'], 1)}",
                ]
                for key, name in names.items()
            ),
        ),
        source("predictions.py", "predictions_gpu"),
    )


@table
def gpu_busy_by_meter() -> str:
    """The meter against the profiler."""
    names = {
        "beast 1024x32 strict": "HalfCheetah-v5, `beast` as 1024 × 32, `--overlap strict`",
        "heavy strict": "`heavy`, `--overlap strict`",
        "beast off": "`beast`, `--overlap off`",
        "sac": "`sac`, 32 environments",
        "device": "CartPole on the GPU, 4,096 environments",
    }
    jobs = results("meter")["agreement"]
    return sourced(
        rows(
            ["job", "by the meter", "by the profiler"],
            *([name, percent(jobs[key]["meter"], 1), percent(jobs[key]["profiler"], 1)] for key, name in names.items()),
        ),
        source("meter.py", "meter"),
    )
