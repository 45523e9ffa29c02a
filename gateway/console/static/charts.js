// The two charts, drawn by uPlot (vendor/): engine time by tier, and the time to first token.

import { byId, element, say } from "./format.js";
import { SPAN_S } from "./history.js";

/* global uPlot */

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FONT = '12px system-ui, "Segoe UI", Roboto, sans-serif';

/** Return the name of the color of each tier, by its name: blues for interactive tiers, sand for bulk. */
export function colorsOf(tiers) {
  const seen = { i: 0, b: 0 };
  return new Map(tiers.map((tier) => {
    const kind = tier.isInteractive ? "i" : "b";
    seen[kind] = Math.min(3, seen[kind] + 1);
    return [tier.name, `--${kind}${seen[kind]}`];
  }));
}

const axis = (values, more = {}) => ({
  stroke: () => css("--muted"),
  grid: { stroke: () => css("--line"), width: 1 },
  ticks: { show: false },
  font: FONT,
  values,
  ...more,
});
const time = (_, splits) => splits.map((t) => new Date(1000 * t).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }));
const TIME_AXIS = axis(time, { incrs: [60, 120], size: 26 });

/** Shade the times in which this page sends a bulk load. */
function shadeLoads(loads) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const right = bbox.left + bbox.width;
    ctx.save();
    ctx.fillStyle = css("--shade");
    for (const [from, to] of loads) {
      const begin = Math.max(bbox.left, plot.valToPos(from, "x", true));
      const end = to === null ? right : Math.min(right, plot.valToPos(to, "x", true));
      if (end > begin) ctx.fillRect(begin, bbox.top, end - begin, bbox.height);
    }
    ctx.restore();
  };
}

function makePlot(target, series, y, yAxis, loads) {
  const size = () => ({ width: target.clientWidth, height: target.clientHeight });
  const options = {
    ...size(),
    series: [{}, ...series],
    scales: { x: { time: true, range: () => [Date.now() / 1000 - SPAN_S, Date.now() / 1000] }, y },
    axes: [TIME_AXIS, axis(yAxis, { size: 52 })],
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 22, 0, 0],
    hooks: { drawClear: [shadeLoads(loads)] },
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], target);
  new ResizeObserver(() => plot.setSize(size())).observe(target);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false));
  return plot;
}

/** A stacked area for each tier, the highest priority at the bottom. */
export class ShareChart {
  #target = byId("share-plot");
  #plot = null;
  #names = [];

  /** Show these tiers, from the highest priority to the lowest. */
  setTiers(tiers, loads) {
    const names = tiers.map((tier) => tier.name);
    if (this.#plot && names.join() === this.#names.join()) return;
    this.#plot?.destroy();
    this.#names = names;
    const colors = colorsOf(tiers);
    // The tallest area is drawn first, so that the lower ones lie upon it.
    const series = [...names].reverse().map((name) => ({
      stroke: () => css(colors.get(name)),
      fill: () => css(colors.get(name)),
      width: 1,
      points: { show: false },
    }));
    const percents = (_, splits) => splits.map((share) => `${Math.round(100 * share)} %`);
    this.#plot = makePlot(this.#target, series, { range: [0, 1] }, percents, loads);
  }

  draw(rows) {
    if (!this.#plot) return;
    const stacked = rows.map((row) => {
      let sum = 0;
      return this.#names.map((name) => (row.shares.has(name) ? (sum += row.shares.get(name)) : null));
    });
    const columns = this.#names.map((_, i) => stacked.map((sums) => sums[i]));
    this.#plot.setData([rows.map((row) => row.t), ...columns.reverse()]);
  }
}

/** First tokens: the p99 that the server observes, the SLO, and the probes of this page. */
export class FirstTokenChart {
  #plot;
  #slo = null;

  constructor(loads) {
    const dots = (color, isFilled) => ({
      paths: () => null,
      stroke: () => css(color),
      points: { show: true, size: 7, width: 1.5, fill: () => css(isFilled ? color : "--surface"), stroke: () => css(color) },
    });
    const line = (color, more) => ({ stroke: () => css(color), width: 2, spanGaps: true, points: { show: false }, ...more });
    const series = [line("--bad", { dash: [4, 4], width: 1.5 }), line("--i1", {}), dots("--i1", false), dots("--b1", true)];
    const y = { range: (_, __, most) => [0, Math.max(0.1, 1.15 * (most ?? 0))] };
    const texts = (_, splits) => splits.map((s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${Number(s.toFixed(2))} s`));
    this.#plot = makePlot(byId("ttft-plot"), series, y, texts, loads);
  }

  setSlo(seconds) {
    this.#slo = seconds;
  }

  draw(found) {
    const now = Date.now() / 1000;
    const rows = [{ t: now - SPAN_S }, ...found.filter(({ t }) => t > now - SPAN_S), { t: now }];
    const column = (name) => rows.map((row) => row[name] ?? null);
    const slo = rows.map(() => this.#slo); // from edge to edge
    this.#plot.setData([column("t"), slo, column("p99"), column("alone"), column("loaded")]);
  }
}

/** Show the entries [{label, text, color}] of a legend. Elements are made only if the labels change. */
export function showLegend(list, entries) {
  const labels = entries.map((entry) => entry.label).join();
  if (list.dataset.labels !== labels) {
    list.dataset.labels = labels;
    list.replaceChildren(...entries.map(({ label, color, kind = "area" }) => {
      const swatch = element("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
      swatch.style.setProperty("--swatch", `var(${color})`);
      return element("li", {}, swatch, `${label} `, element("b"));
    }));
  }
  entries.forEach(({ text }, i) => say(list.children[i].querySelector("b"), text));
}
