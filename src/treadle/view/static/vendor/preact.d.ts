// What the pages use of htm/preact/standalone, for `tsc`.
type Cleanup = (() => void) | void | boolean;
export function html(strings: TemplateStringsArray, ...values: any[]): any;
export function h(type: any, props: any, ...children: any[]): any;
export function render(tree: any, parent: Element): void;
export function useState<T>(initial: T | (() => T)): [T, (next: any) => void];
export function useEffect(effect: () => Cleanup, inputs?: any[]): void;
export function useMemo<T>(make: () => T, inputs: any[]): T;
export function useRef<T>(initial: T): {current: T};
