// Elements from templates, in which no text steers: whatever a user, a model or a tool wrote is shown as it is.
import {html as plain} from "pages/vendor/preact.js";
import {visible} from "pages/format.js";

const SHOWN = ["title", "aria-label"];

/** @param {TemplateStringsArray} strings @param {...any} values */
export function html(strings, ...values) {
  return shown(plain(strings, ...values));
}

/**
 * @param {any} node what preact draws; the properties of a component are left alone: names in links must stay exact
 * @returns {any}
 */
function shown(node) {
  if (typeof node === "string") return visible(node);
  if (Array.isArray(node)) return node.map(shown);
  if (typeof node?.type !== "string") return node;
  const {props} = node;
  if (props.children !== undefined) props.children = shown(props.children);
  for (const name of SHOWN) if (typeof props[name] === "string") props[name] = visible(props[name]);
  return node;
}
