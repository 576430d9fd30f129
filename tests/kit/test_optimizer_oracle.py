"""The formula of Adam and AdamW that judges use, against torch's own, which steps in place."""

from __future__ import annotations

import pytest
import torch
from moeref_conformance.contract.requests.optimizer import SCHEDULE, SETTINGS
from moeref_conformance.oracles import optimizer

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("settings", [optimizer.PLAIN, optimizer.read(SETTINGS)])
def test_the_last_step_is_that_of_torch(settings: optimizer.Settings) -> None:
    """With weights that stay until the last step, as the judges' steps at a rate of 0 leave them."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(of).double()) for of in ((5, 3), (7,))]
    gradients = [[scale * torch.randn_like(of) for of in weights] for scale in (1e-3, 1.0, 3e-2)]
    begun = [of.detach().clone() for of in weights]
    named = {"betas": settings.betas, "eps": settings.epsilon, "weight_decay": settings.decay}
    adam, norms = torch.optim.AdamW(weights, lr=0.0, **named), list[float]()
    for number, step in enumerate(gradients, 1):
        for of, gradient in zip(weights, step, strict=True):
            of.grad = gradient.clone()
        norms.append(optimizer.norm({str(n): gradient for n, gradient in enumerate(step)}))
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(weights, settings.clip)
        adam.param_groups[0]["lr"] = 1e-2 if number == len(gradients) else 0.0
        adam.step()
    assert min(norms) < SETTINGS["clip_grad"] < max(norms)
    for n, (of, held) in enumerate(zip(weights, begun, strict=True)):
        added = optimizer.update([step[n] for step in gradients], 1e-2, settings, norms, held)
        torch.testing.assert_close(of.detach() - held, added, rtol=1e-5, atol=1e-9)


def test_a_schedule_is_torchs_line_and_cosine() -> None:
    """torch's chainable schedulers, which go on from the rate before, at every step to the end and behind it."""
    of = optimizer.Schedule.read(SCHEDULE)
    adam = torch.optim.Adam([torch.zeros(1)], lr=of.highest)
    up = torch.optim.lr_scheduler.LambdaLR(adam, lambda number: number / of.warmup)
    rates = list[float]()
    for _ in range(int(of.warmup)):
        rates += up.get_last_lr()
        adam.step()
        up.step()
    down = torch.optim.lr_scheduler.CosineAnnealingLR(adam, int(of.end - of.warmup), of.lowest)
    for _ in range(int(of.end - of.warmup) + 1):
        rates += down.get_last_lr()
        adam.step()
        down.step()
    assert [of.at(number) for number in range(len(rates))] == pytest.approx(rates)
    assert of.at(len(rates)) == of.lowest
    assert of._replace(cosine=False).at((of.warmup + of.end) / 2) == pytest.approx((of.highest + of.lowest) / 2)
