// Numbers for people: few digits, units always, a dash for what nobody has measured.

export const NONE = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return NONE;
  if (value >= 1e9) return `${digits(value / 1e9)} G`;
  if (value >= 1e6) return `${digits(value / 1e6)} M`;
  if (value >= 1e4) return `${digits(value / 1e3)} k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  const text = value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function duration(us) {
  if (!known(us)) return NONE;
  const size = Math.abs(us);
  if (size < 0.5) return "0 us";
  if (size < 1000) return `${digits(us)} us`;
  if (size < 1e6) return `${digits(us / 1e3)} ms`;
  return `${digits(us / 1e6)} s`;
}

export function share(value) {
  if (!known(value)) return NONE;
  const percent = value * 100;
  if (percent > 0 && percent < 0.01) return "<0.01 %";
  return `${percent < 10 ? percent.toFixed(2) : percent.toFixed(1)} %`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${digits(value)} ${units[at]}`;
}

export function span(seconds) {
  if (!known(seconds)) return NONE;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

// A moment of the daemon's clock, in this browser's time zone.
export function clock(iso) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return NONE;
  const two = (value) => String(value).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return day === today() ? time : `${day} ${time}`;
}

function today() {
  const now = new Date();
  const two = (value) => String(value).padStart(2, "0");
  return `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
}

// A table's name is MODEL/TABLE; a model's name may have slashes in it, a table's may not.
export function names(name) {
  const at = name.lastIndexOf("/");
  return { model: at < 0 ? "" : name.slice(0, at), table: name.slice(at + 1) };
}
