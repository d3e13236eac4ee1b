"""The command line: `densegrpo COMMAND ...`."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

import tyro

import densegrpo_jax_configs
from densegrpo_jax import __version__
from densegrpo_jax.config import Config
from densegrpo_jax_configs import places
from densegrpo_jax_configs.variants import VARIANTS, apply

CONFIGS = Path(densegrpo_jax_configs.__file__).parent


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0 done, 1 interrupted, 2 bad input (one line says what), 3 a run that stopped itself."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        print(f"densegrpo: unknown command {argv[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[argv[0]](argv[1:])
    except BrokenPipeError:  # what is printed goes to `head` or the like, which has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        return 1
    except (ValueError, OSError) as error:
        print(f"densegrpo {argv[0]}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from densegrpo_jax.train.health import Stopped

        if not isinstance(error, Stopped):
            raise
        print(f"densegrpo {argv[0]}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        continues = "; the last checkpoint stands, the same command continues from it" * (argv[0] in ("train", "calibrate"))
        print(f"densegrpo {argv[0]}: interrupted{continues}", file=sys.stderr)
        return 1


def load_config(name: str) -> Config:
    """The config of a file or of a name in configs/, with variants and places after colons: "toy", "configs/toy.py", "toy:flow_grpo:cps",
    "sd35_medium_pickscore:v6e-2x4".

    Raises:
      ValueError: no such file or variant, or a file without `get_config`; lists what there is.
    """
    name, *variants = name.split(":")
    for path in (Path(name), CONFIGS / name, CONFIGS / f"{name}.py", CONFIGS / Path(name).name):
        if path.is_file() and path.suffix == ".py":
            break
    else:
        raise ValueError(f"no config {name!r}; there are:\n{_list_configs()}")
    spec = importlib.util.spec_from_file_location(f"densegrpo_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError("a config file defines get_config() -> densegrpo_jax.config.Config")
        config = module.get_config()
    except Exception as error:  # the file is a program, which may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path}: {kind}{error}") from error
    if not isinstance(config, Config):
        raise ValueError(f"{path}: get_config() returns a densegrpo_jax.config.Config, not {type(config).__name__}")
    return apply(config, variants, places.of(path.stem)) if variants else config


def one_arena() -> None:
    """Has glibc take memory for all threads from one place, unless the user has chosen otherwise.

    By default each thread has an arena; the checkpoint writer leaves those of its threads in pieces, so memory grows with every checkpoint.
    """
    if not os.environ.keys() & {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").mallopt(-8, 1)  # M_ARENA_MAX


def _train(argv: list[str]) -> int:
    """train CONFIG [--section.field VALUE ...]    fine-tune; the same command again continues"""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"densegrpo {_train.__doc__}\n\nconfigs:\n{_list_configs()}\n\nvariants of any of them, CONFIG:VARIANT:\n{_list_variants()}")
        print(f"\nplaces that the full-size ones are set for, CONFIG:PLACE (for others `densegrpo plan --search`):\n{_list_places()}")
        print("\n`densegrpo train CONFIG --help` explains every field.")
        return 0
    config = tyro.cli(Config, default=load_config(argv[0]), args=argv[1:], prog=f"densegrpo train {argv[0]}")
    one_arena()
    from densegrpo_jax import doctor, parallel
    from densegrpo_jax.train.loop import train

    parallel.join(config.parallel)
    doctor.refuse(config)
    report = train(config)
    if parallel.primary():
        print(f"report: {report}")
    return 0


def _calibrate(argv: list[str]) -> int:
    """calibrate CONFIG [--report] [...]          find the noise level of each step before training: psi.json"""
    from densegrpo_jax import calibrate, doctor, parallel

    if not argv or argv[0] in ("-h", "--help"):
        print(f"densegrpo {_calibrate.__doc__}\n\nconfigs:\n{_list_configs()}\n\n`densegrpo calibrate CONFIG --help` explains every field.")
        return 0
    default = calibrate.Command(load_config(argv[0]))
    command = tyro.cli(calibrate.Command, default=default, args=argv[1:], prog=f"densegrpo calibrate {argv[0]}")
    parallel.join(command.config.parallel)
    doctor.refuse(command.config, training=False)
    calibrate.main(command)
    return 0


def _plan(argv: list[str]) -> int:
    """plan CONFIG --topology v5e:4x4 [--search]   say without an accelerator whether a config fits one, and what it costs"""
    from densegrpo_jax.plan import command

    if not argv or argv[0] in ("-h", "--help"):
        print(f"densegrpo {_plan.__doc__}\n\nconfigs:\n{_list_configs()}\n\n`densegrpo plan CONFIG --help` explains every field.")
        return 0
    default = command.Plan(load_config(argv[0]), topology=places.topology(argv[0]) or command.Plan.topology)
    return command.main(tyro.cli(command.Plan, default=default, args=argv[1:], prog=f"densegrpo plan {argv[0]}"), argv[0])


def _doctor(argv: list[str]) -> int:
    """doctor CONFIG [--no-dry-run] [...]         check a config, its model, prompts and rewards before a run"""
    from densegrpo_jax import doctor

    if not argv or argv[0] in ("-h", "--help"):
        print(f"densegrpo {_doctor.__doc__}\n\nconfigs:\n{_list_configs()}\n\n`densegrpo doctor CONFIG --help` explains every field.")
        return 0
    default = doctor.Doctor(load_config(argv[0]))
    return doctor.main(tyro.cli(doctor.Doctor, default=default, args=argv[1:], prog=f"densegrpo doctor {argv[0]}"))


def _sample(argv: list[str]) -> int:
    """sample FOLDER --prompt TEXT ...             draw images with a model folder, with or without an adapter"""
    from densegrpo_jax import sample

    sample.main(tyro.cli(sample.Sample, args=argv, prog="densegrpo sample"))
    return 0


def _eval(argv: list[str]) -> int:
    """eval RUN|ADAPTER|MODEL --out FOLDER ...     score fixed prompts at fixed noise; --compare A B for the difference"""
    from densegrpo_jax import evaluate

    args = tyro.cli(evaluate.Evaluate, args=argv, prog="densegrpo eval")
    expected = None
    if args.repeat:
        args, expected = evaluate.repeated(args)
    evaluate.main(args, load_config(args.task) if args.task else None, expected=expected)
    return 0


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the adapter of a run for diffusers, PEFT or ComfyUI, or folded into a full model folder."""

    run: tyro.conf.Positional[Path]
    """Work folder of the run."""
    out: Path
    """Folder to write; new or empty."""
    format: Literal["diffusers", "peft", "merged"] = "diffusers"
    """For pipe.load_lora_weights and ComfyUI; for PEFT; or a full model folder with the adapter folded in."""
    weights: Literal["ema", "last"] = "ema"
    """The running average that evaluation uses, or the last weights."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of a merged transformer; that of the folder by default."""


def _export(argv: list[str]) -> int:
    """export RUN --out FOLDER                    the trained adapter for diffusers, PEFT, ComfyUI, or merged"""
    args = tyro.cli(Export, args=argv, prog="densegrpo export")
    from densegrpo_jax import export, policy
    from densegrpo_jax.train import checkpoint

    adapter, model = checkpoint.trained_adapter(args.run, args.weights)
    if model["path"] == "toy":
        raise ValueError(f"{args.run}: the toy has no model folder that another program could load")
    print(export.export(adapter, policy.folder(model["path"]), args.format, args.out, model["variant"], args.dtype))
    return 0


def _prompts(argv: list[str]) -> int:
    """prompts geneval|ocr|check ...               make prompt files for training and testing, or say what is in some"""
    from densegrpo_jax.prompts import command

    command.main(tyro.cli(command.Command, args=argv, prog="densegrpo prompts"))
    return 0


def _serve_rewards(argv: list[str]) -> int:
    """serve-rewards --reward NAME ...             offer a reward over HTTP to trainers here or on other machines"""
    from densegrpo_jax.rewards import server

    return server.serve(tyro.cli(server.Server, args=argv, prog="densegrpo serve-rewards"))


COMMANDS = {
    "train": _train,
    "calibrate": _calibrate,
    "doctor": _doctor,
    "plan": _plan,
    "sample": _sample,
    "eval": _eval,
    "export": _export,
    "prompts": _prompts,
    "serve-rewards": _serve_rewards,
}


def _overview() -> str:
    lines = "\n".join(f"  {command.__doc__}" for command in COMMANDS.values())
    return f"densegrpo {__version__}: dense step-wise rewards for flow-matching text-to-image models, in JAX\n\n{lines}"


def _list_configs() -> str:
    rows = []
    for path in sorted(set(CONFIGS.glob("*.py")) - {CONFIGS / "__init__.py", CONFIGS / "variants.py", CONFIGS / "places.py"}):
        first = path.read_text().lstrip().removeprefix('"""').splitlines()[0].removesuffix('"""')
        rows.append(f"  {path.stem:<26} {first}")
    return "\n".join(rows)


def _list_variants() -> str:
    return "\n".join(f"  {name:<26} {function.__doc__}" for name, function in VARIANTS.items())


def _list_places() -> str:
    return "\n".join(f"  {name:<26} {', '.join(known)}" for name, known in places.PLACES.items())
