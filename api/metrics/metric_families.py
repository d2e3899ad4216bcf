"""Metrics of one number each, labelled with the model's name: what collectors are made of."""

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True)
class MetricFamilies:
    """Names begin with `prefix`."""

    prefix: str
    model_name: str

    def gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, help_text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(self.prefix + name, help_text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family
