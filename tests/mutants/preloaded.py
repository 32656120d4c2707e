"""What every trial imports and no mutant changes: loaded once, in the process that trials are forked from."""

import aiokafka
import alembic.command
import faust
import fsspec
import httpx
import hypothesis
import numpy
import openai
import pydantic
import pytest
import pytest_asyncio
import sqlalchemy.ext.asyncio
import starlette.applications
import torch
import transformers

__all__ = [
    "aiokafka",
    "alembic",
    "faust",
    "fsspec",
    "httpx",
    "hypothesis",
    "numpy",
    "openai",
    "pydantic",
    "pytest",
    "pytest_asyncio",
    "sqlalchemy",
    "starlette",
    "torch",
    "transformers",
]
