"""An environment that waits for HTTP: hundreds of episodes are in flight at once, on one event loop.

The service is a generated website, which is served on this machine and takes 20 ms for each page. At each page, the
agent sees what the texts of six links say, and follows one. A page about astronomy is worth 1. Needs `unidle[web]`.
"""

import re
import subprocess
import sys

import aiohttp
import numpy as np
from gymnasium import spaces

import unidle

TOPIC = {"comet", "orbit", "telescope", "galaxy", "nebula", "planet", "eclipse", "meteor", "solar", "stellar"}
ADVERTISING = {"offer", "winner", "sponsored", "deal", "bargain"}
LINK = re.compile(r'<a href="(/[^"#]*\.html)">([^<]*)</a>')
N_LINKS = 6


class Browse:
    """Follow 20 links; `reset`, `step` and `close` are coroutines, otherwise as in Gymnasium."""

    observation_space = spaces.Box(0, 1, (N_LINKS, 2), np.float32)
    action_space = spaces.Discrete(N_LINKS)

    def __init__(self, site):
        self.site, self.session = site, None

    async def reset(self, *, seed=None, options=None):
        if self.session is None:
            self.session = aiohttp.ClientSession(self.site)
        self.random, self.steps = np.random.default_rng(seed), 0
        await self.open("/0/")
        return self.observation(), {}

    async def step(self, action):
        page = await self.open(self.links[action][0])
        self.steps += 1
        words = re.findall(r"[a-z]+", page)
        reward = float(sum(word in TOPIC for word in words) > 0.04 * len(words))
        return self.observation(), reward, False, self.steps == 20, {}

    async def close(self):
        if self.session is not None:
            await self.session.close()

    async def open(self, url):
        """The text of a page; six of its links, in random order, are the ones to choose from."""
        async with self.session.get(url) as response:
            page = await response.text()
        links = LINK.findall(page) or [("/0/", "")]
        self.links = [links[i] for i in self.random.permutation(max(N_LINKS, len(links)))[:N_LINKS] % len(links)]
        return re.sub(r"<[^>]*>", " ", page)

    def observation(self):
        texts = [set(text.split()) for _, text in self.links]
        return np.array([[bool(text & TOPIC), bool(text & ADVERTISING)] for text in texts], np.float32)


if __name__ == "__main__":
    command = [sys.executable, "-m", "unidle.tasks.web.site", "--latency", "0.02", "--page-bytes", "2000"]
    server = subprocess.Popen([*command, "--links", "20"], stdout=subprocess.PIPE, text=True)
    try:
        site = re.search(r"http://\S+?(?=/0/)", server.stdout.readline())[0]
        run = unidle.train(
            Browse, env_kwargs={"site": site}, n_envs=128, n_steps=20, batch_size=320, timesteps=20_000, gamma=0.9
        )
        print(f"pages about astronomy: {run.evaluate(episodes=20).mean_return:.1f} of 20")
    finally:
        server.terminate()
        server.wait()
