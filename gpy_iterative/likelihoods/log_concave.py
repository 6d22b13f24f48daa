"""Which likelihoods are log-concave in their one latent value."""

from gpytorch.likelihoods import LaplaceLikelihood, Likelihood

from gpy_iterative.likelihoods.registry import computes_as, form_of


def is_log_concave(likelihood: Likelihood) -> bool:
    """Whether log p(y | f) is known to be concave in f, of which there is one at each point."""
    if computes_as(likelihood, LaplaceLikelihood):  # not registered: its curvature is zero almost everywhere
        return True
    form = form_of(likelihood)
    if form is None or form.num_latents is None:
        return False
    return form.log_concave is True and form.num_latents(likelihood) in (1, None)
