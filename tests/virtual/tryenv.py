import gymnasium as gym, numpy as np, torch
from torch import nn
from tests.virtual import modules
class Env(gym.Env):
    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self): self.n = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0, self.n], np.float32), {}
    def step(self, action):
        k = modules.kernel()
        k.sleep(0.001 * k.random.random())
        self.n += 1
        return np.array([0, self.n], np.float32), 1.0, self.n % 7 == 0, False, {}
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4)); self.b = nn.Parameter(torch.zeros(3))
    def forward(self, obs):
        return (obs[..., 0] * 0 + self.a[0]).long() % 2
